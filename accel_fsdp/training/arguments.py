"""The flags of `train/sft.py`, under the names that Trainer and TRL users type already."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import prod
from pathlib import Path
from typing import Any, Literal, NoReturn

from transformers import HfArgumentParser, TrainingArguments
from transformers.hf_argparser import HfArg

from accel_fsdp import command_line, console
from accel_fsdp.config import EXPERT_FLAG, Method
from accel_fsdp.errors import UsageError, UserError, did_you_mean, first_line
from accel_fsdp.launch import launcher
from accel_fsdp.launch_environment import LaunchEnvironment
from accel_fsdp.ranks import cpu
from accel_fsdp.training import flag_values, mesh
from accel_fsdp.training.data import DataArguments

RECORDER = {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"}
"""The size of torch's flight recorder, by its new name and its old one."""
RECORDED = "2000"
OWN_STORES = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
REFUSALS = (ValueError, TypeError, KeyError, AttributeError, OverflowError, ImportError, RuntimeError, OSError)
"""Exceptions that Trainer raises for arguments that it can't use."""
SEE_HELP = "see all arguments: python train/sft.py --help"


@dataclass
class ModelArguments:
    """The arguments about the model, and about which parameters are trained."""

    model_name_or_path: str = HfArg(help="Hub id or local folder.")
    model_revision: str = HfArg(default="main", help="Branch, tag or commit on the hub.")
    trust_remote_code: bool = HfArg(
        default=False, help="Run the Python code that comes with the model. Read it first: it can do whatever you can."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = HfArg(
        default="auto",
        help="Dtype of the loaded weights. auto: float32 for full training (the master weights), the "
        "checkpoint's own for the frozen base of --use_peft. The compute precision is the YAML's mixed_precision.",
    )
    attn_implementation: str | None = HfArg(default=None, help="eager, sdpa, flash_attention_2, ...")
    resize_vocab: bool = HfArg(
        default=False, help="Add embedding rows where the tokenizer has more tokens than the model; never shrinks."
    )
    expert_parallel_size: int = HfArg(
        default=1,
        help="Expert parallelism: the number of ranks that divide a mixture's experts. The YAML has the sizes of "
        "all other axes.",
    )
    use_peft: bool = HfArg(default=False, help="Train a LoRA adapter; the base model stays frozen.")
    lora_r: int = HfArg(default=16, help="Rank of the adapter matrices.")
    lora_alpha: int = HfArg(default=32, help="Scale of the adapter: alpha / r.")
    lora_dropout: float = HfArg(default=0.05, help="Dropout on the adapter's input.")
    use_dora: bool = HfArg(
        default=False, help="DoRA: the adapter also learns each output's magnitude. Needs --use_peft."
    )
    load_in_4bit: bool = HfArg(
        default=False, help="QLoRA: quantise the frozen base to 4 bits (bitsandbytes). Needs --use_peft."
    )
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = HfArg(default="nf4", help="4-bit data type.")
    bnb_4bit_quant_storage: Literal["bfloat16", "float16", "float32", "uint8"] = HfArg(
        default="bfloat16",
        help="Dtype that the 4-bit weights are packed in: FSDP shards floating ones only, and casts those "
        "that differ from mixed_precision.",
    )
    lora_target_modules: list[str] = HfArg(
        default_factory=lambda: ["all-linear"],
        help="Names of the modules that get an adapter; all-linear: every linear layer but the head, "
        "and not the fused experts of a mixture.",
    )
    lora_modules_to_save: list[str] = HfArg(
        default_factory=list, help="Modules trained in full beside the adapter, such as lm_head. One process or DDP."
    )
    use_rslora: bool = HfArg(
        default=False, help="Scale the adapter by alpha / sqrt(r) instead of alpha / r. Needs --use_peft."
    )
    eos_token: str | None = HfArg(default=None, help="Token that ends a text, where the tokenizer has another or none.")
    pad_token: str | None = HfArg(
        default=None, help="Token that fills short rows, where the tokenizer has none of its own."
    )

    @property
    def source(self) -> tuple[str, str, bool]:
        """Where config, tokenizer and weights are read from."""
        return self.model_name_or_path, self.model_revision, self.trust_remote_code

    @property
    def method(self) -> Method:
        return "qlora" if self.load_in_4bit else "lora" if self.use_peft else "full"


@dataclass
class SftArguments(TrainingArguments):  # type: ignore[misc]
    """Everything of `TrainingArguments`. On a machine without accelerator, gloo on CPU is set up first."""

    accelerate_config: str | None = HfArg(
        default=None,
        help="The Accelerate YAML, under torchrun (the number of processes is torchrun's). Under accelerate launch it "
        "is --config_file instead.",
    )

    early_stopping_patience: int | None = HfArg(
        default=None,
        help="Stop after so many evaluations without a better held-out loss, and export the best model; needs "
        "--eval_strategy and the same --save_strategy.",
    )
    resume_with_changes: bool = HfArg(
        default=False,
        help="Resume although model, data, their order or the schedule differ from the checkpoint's. Each change is "
        "logged; run.json and the card record the settings of all steps.",
    )
    logging_steps: float = HfArg(
        default=0,
        help="Steps between two log lines; below 1, a share of all steps. 0: every 10 steps, in runs of fewer than 100 "
        "a tenth of them. The first and the last step are always logged.",
    )
    ignore_nan_inf: bool = HfArg(
        default=False,
        help="Leave out the update of a step whose loss or gradient norm is NaN or infinite, and go on. Without "
        "it, training stops there: later steps would be NaN too.",
    )
    hang_timeout: float | None = HfArg(
        default=None,
        help="Seconds that a step, save or evaluation may take. After that the rank writes its stacks and exits, which "
        "ends the job. 0: no limit. (default: that of accel-fsdp launch --hang-timeout, else no limit)",
    )
    profile_steps: str | None = HfArg(
        default=None,
        help="Profile these steps: 3:5 are 3, 4 and 5, as the log counts them. The folder profile of --output_dir "
        "then holds torch's trace of each rank, and on GPUs a memory snapshot.",
    )
    async_checkpoints: bool = HfArg(
        default=False,
        help="Write checkpoints in the background: training waits only until each rank has copied its shards to host "
        "memory. One at a time.",
    )
    checkpoint_uri: str | None = HfArg(
        default=None,
        help="Also upload complete checkpoints here, in the background: s3://BUCKET/RUN, gs://, az://, hf://, any URI "
        "that fsspec knows. --resume_from_checkpoint true finds the newest one, here or there.",
    )
    upload_timeout: float = HfArg(
        default=600, help="Seconds to wait at the end of the run until the newest checkpoint is at --checkpoint_uri."
    )
    final_export: Literal["gather", "stream"] = HfArg(
        default="gather",
        help="How final/ is written from a sharded model. gather: the ranks send their shards to the first one, whose "
        "host must hold the whole model. stream: the first rank reads the last checkpoint, some tensors at a time.",
    )
    export_dtype: Literal["auto", "float32", "bfloat16", "float16"] = HfArg(
        default="auto",
        help="Dtype of the exported weights. auto: the base model's; an adapter stays as it was trained.",
    )

    def __post_init__(self) -> None:
        if not RECORDER & os.environ.keys():  # the user's own value stays; read when the process group is made
            os.environ.update(dict.fromkeys(RECORDER, RECORDED))
        self.logs_often = self.logging_steps == 0
        self.logging_steps = self.logging_steps or 1  # Trainer refuses 0
        if self.early_stopping_patience is not None:
            self._check_early_stopping(self.early_stopping_patience)
            self.load_best_model_at_end = True
        trackers: Any = self.report_to  # type: ignore[has-type]
        if isinstance(trackers, str):  # one word on the command line, although Trainer takes a list
            self.report_to = trackers.split(",")
        launch = LaunchEnvironment.now()
        if launch.uses_deepspeed:  # Trainer stops where its own flags differ from what the YAML told DeepSpeed
            self.bf16, self.fp16 = launch.mixed_precision == "bf16", launch.mixed_precision == "fp16"
        if self.fsdp:
            raise UsageError(
                "--fsdp is set besides the YAML",
                why="Trainer would then ignore most of the YAML's FSDP settings, silently",
                fix="leave out --fsdp and --fsdp_config; the YAML decides",
            )
        if cpu.enable():
            self.use_cpu = True
            cpu.init_process_group(self.ddp_timeout)
        super().__post_init__()

    def _check_early_stopping(self, patience: int) -> None:
        if patience < 1:
            raise UsageError(
                f"--early_stopping_patience {patience}", why="it would stop at once", fix="--early_stopping_patience 3"
            )
        if self.eval_strategy == "no":
            raise UsageError(
                "--early_stopping_patience without evaluation",
                why="there is no held-out loss that could stop getting better",
                fix="--eval_strategy steps --save_strategy steps",
            )


def parse() -> tuple[ModelArguments, DataArguments, SftArguments]:
    parser = _Parser([ModelArguments, DataArguments, SftArguments], allow_abbrev=False)
    _require_launcher()
    _refuse_unknown(parser, sys.argv[1:])
    experts = _word_after(EXPERT_FLAG) or "1"
    mesh.choose(int(experts) if experts.isdecimal() else 1)
    try:
        model, data, training = parser.parse_args_into_dataclasses()
    except REFUSALS as error:
        raise UsageError(first_line(error), why="Trainer refuses these arguments", fix=SEE_HELP) from error
    if data.max_length < 2:
        raise UsageError(f"--max_length {data.max_length} is too short", why="nothing is left to predict", fix=SEE_HELP)
    if data.streaming and training.max_steps < 1:
        raise UsageError(
            "--streaming without --max_steps", why="a stream doesn't say how long it is", fix="--max_steps N"
        )
    _check_adapter(model)
    if model.resize_vocab and model.use_peft:
        raise UsageError(
            "--resize_vocab with --use_peft",
            why="under an adapter the embedding is frozen, so the new rows would stay as they begin",
            fix="full training; or train the rows first and adapt the model that comes out",
        )
    if training.eval_on_start and training.eval_strategy == "no":
        raise UsageError(
            "--eval_on_start without evaluation", why="there is nothing to evaluate on", fix="--eval_strategy steps"
        )
    # A rank that hands out batches to the others needs them of one length, and repeats rows in the last one
    training.accelerator_config.dispatch_batches = False
    flag_values.check(model, data, training)
    return model, data, training


def refuse_wrong(words: Sequence[str]) -> None:
    """Raises a UsageError for an unknown flag or a wrong value among the words of a command line, started or not."""
    parser = _Parser([ModelArguments, DataArguments, SftArguments], allow_abbrev=False)
    _refuse_unknown(parser, words)
    for action in parser._actions:
        action.required = False
    parser.parse_args(words)


def _refuse_unknown(parser: HfArgumentParser, words: Sequence[str]) -> None:
    options = {option for action in parser._actions for option in action.option_strings}
    for flag in (word.split("=")[0] for word in words if word.startswith("--")):
        if flag not in options:
            hint = flag_values.TRL.get(command_line.field_name(flag))
            guess = "" if hint else did_you_mean(flag, options)
            raise UsageError(
                f"unknown argument {flag}.{guess}", why="train/sft.py has no such argument", fix=hint or SEE_HELP
            )


def _check_adapter(model: ModelArguments) -> None:
    """Refuses flags for an adapter without `--use_peft`: the whole model would be trained instead."""
    if model.load_in_4bit and not model.use_peft:
        raise UsageError(
            "--load_in_4bit without --use_peft", why="4-bit weights can't be trained, only adapters", fix="--use_peft"
        )
    plain = ModelArguments(model.model_name_or_path)
    for name in (field.name for field in fields(model) if getattr(model, field.name) != getattr(plain, field.name)):
        if name.startswith(("lora_", "use_dora", "use_rslora")) and not model.use_peft:
            raise UsageError(f"--{name} without --use_peft", why="it only affects an adapter", fix="--use_peft")
        if name.startswith("bnb_4bit_") and not model.load_in_4bit:
            raise UsageError(
                f"--{name} without --load_in_4bit", why="it only affects 4-bit weights", fix="--use_peft --load_in_4bit"
            )


COMMON = (
    *("model_name_or_path", "dtype", "attn_implementation", "use_peft", "lora_r", "lora_alpha", "load_in_4bit"),
    *("dataset_name", "dataset_train_split", "dataset_test_split", "max_length", "packing", "streaming", "output_dir"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_steps", "learning_rate"),
    *("lr_scheduler_type", "warmup_steps", "optim", "gradient_checkpointing", "use_liger_kernel", "eval_strategy"),
    *("save_steps", "save_total_limit", "resume_from_checkpoint", "logging_steps", "report_to"),
)
"""The flags that `--help` shows first: those that most runs have."""


class _Parser(HfArgumentParser):  # type: ignore[misc]
    def format_help(self) -> str:
        """A line of usage, the flags that people use, all others."""
        by_name = {action.dest: action for action in self._actions}
        formatter = self._get_formatter()
        formatter.add_usage("%(prog)s --model_name_or_path MODEL --dataset_name DATA [flags]", self._actions, [])
        for title, names in (("flags that most runs have", COMMON), ("all others", by_name.keys() - {*COMMON})):
            formatter.start_section(title)
            formatter.add_arguments([by_name[name] for name in by_name if name in names])
            formatter.end_section()
        return str(formatter.format_help())

    def error(self, message: str) -> NoReturn:
        """Reports a parsing error alone: argparse would print 150 flags before it."""
        raise UsageError(message, why="the job can't start with these arguments", fix=SEE_HELP)


def _require_launcher() -> None:
    """Makes sure that one Accelerate YAML applies: the launcher's, or under torchrun that of `--accelerate_config`.

    Raises:
        UserError: there is no YAML, there are two, or no launcher started this process as a rank of a job.
    """
    file = _word_after("--accelerate_config")
    if {"-h", "--help"} & set(sys.argv):
        return
    launch = LaunchEnvironment.now()
    if launch.has_config and file is not None:
        raise UsageError(
            "--accelerate_config under accelerate launch",
            why="the launcher has its own --config_file, and only one of them can decide",
            fix="leave it out, or start with torchrun",
        )
    if file is not None and launch.is_rank:
        os.environ.update(launcher.rank_environment(Path(file), Path(sys.argv[0])))
        _check_mesh(file)
        if launch.restarts_meet_in_one_store and launch.rank == 0:
            console.say(
                "restarted ranks may connect to the address of the previous attempt (torch 2.13): "
                f"start with {OWN_STORES} torchrun",
                style="yellow",
            )
    elif not launch.has_config:
        raise UserError(
            "not started by accelerate launch or torchrun",
            why="no FSDP setting is read without them, and the model would train unsharded",
            fix="accelerate launch --config_file FILE.yaml train/sft.py ..., or torchrun --standalone "
            "--nproc-per-node N train/sft.py --accelerate_config FILE.yaml ... (accel-fsdp config makes FILE.yaml)",
        )


def _check_mesh(file: str) -> None:
    """Refuses a mesh whose size differs from torchrun's number of ranks, as after the loss of a machine."""
    launch = LaunchEnvironment.now()
    ranks = prod(launch.mesh.values())
    if launch.mesh and ranks != launch.world_size:
        sizes = " x ".join(f"{name} {size}" for name, size in launch.mesh.items())
        raise UserError(
            f"{file} lays out {ranks} ranks ({sizes}), and there are {launch.world_size}",
            why="parallelism_config is for a fixed number: hybrid sharding can't grow or shrink with the machines",
            fix="a YAML without parallelism_config for an elastic job, or as many ranks as it lays out",
        )


def _word_after(flag: str) -> str | None:
    """The value of a flag that is needed before the command line is parsed: the last one, as argparse takes it."""
    values = [
        word.partition("=")[2] or following
        for word, following in zip(sys.argv, [*sys.argv[1:], ""], strict=True)
        if word == flag or word.startswith(f"{flag}=")
    ]
    return values[-1] if values else None
