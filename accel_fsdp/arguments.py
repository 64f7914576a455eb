"""The flags of `train/sft.py`, under the names that Trainer and TRL users type already."""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

from transformers import HfArgumentParser, TrainingArguments

from accel_fsdp import config, cpu, jobs
from accel_fsdp.errors import UsageError, UserError, did_you_mean
from accel_fsdp.files import checkpoints

SEE_HELP = "see all arguments: python train/sft.py --help"


@dataclass
class ModelArguments:
    """Which model, and what of it is trained."""

    model_name_or_path: str = field(metadata={"help": "Hub id or local folder."})
    model_revision: str = field(default="main", metadata={"help": "Branch, tag or commit on the hub."})
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = field(
        default="auto",
        metadata={
            "help": "Dtype of the loaded weights. auto: float32 for full training (the master weights), the "
            "checkpoint's own for the frozen base of --use_peft. The compute precision is the YAML's mixed_precision."
        },
    )
    attn_implementation: str | None = field(default=None, metadata={"help": "eager, sdpa, flash_attention_2, ..."})
    resize_vocab: bool = field(
        default=False,
        metadata={"help": "Add embedding rows where the tokenizer has more tokens than the model; never shrinks."},
    )
    use_peft: bool = field(default=False, metadata={"help": "Train a LoRA adapter; the base model stays frozen."})
    lora_r: int = field(default=16, metadata={"help": "Rank of the adapter matrices."})
    lora_alpha: int = field(default=32, metadata={"help": "Scale of the adapter: alpha / r."})
    lora_dropout: float = field(default=0.05, metadata={"help": "Dropout on the adapter's input."})
    use_dora: bool = field(
        default=False, metadata={"help": "DoRA: the adapter also learns each output's magnitude. Needs --use_peft."}
    )
    load_in_4bit: bool = field(
        default=False, metadata={"help": "QLoRA: quantise the frozen base to 4 bits (bitsandbytes). Needs --use_peft."}
    )
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = field(default="nf4", metadata={"help": "4-bit data type."})
    bnb_4bit_quant_storage: Literal["bfloat16", "float16", "float32", "uint8"] = field(
        default="bfloat16",
        metadata={
            "help": "Dtype that the 4-bit weights are packed in: FSDP shards floating ones only, and casts those "
            "that differ from mixed_precision."
        },
    )
    lora_target_modules: list[str] = field(
        default_factory=lambda: ["all-linear"],
        metadata={"help": "Names of the modules that get an adapter; all-linear: every linear layer but the head."},
    )


@dataclass
class DataArguments:
    """What it is trained on."""

    dataset_name: str = field(metadata={"help": "Hub id, local folder, or a .jsonl, .json, .csv or .parquet file."})
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a hub data set."})
    dataset_train_split: str = field(default="train", metadata={"help": "Split to train on."})
    dataset_test_split: str = field(default="test", metadata={"help": "Split for evaluation (--eval_strategy)."})
    dataset_text_field: str = field(default="text", metadata={"help": "Column of plain text, without messages."})
    max_length: int = field(default=1024, metadata={"help": "Tokens per row; longer rows are cut, and counted."})


@dataclass
class SftArguments(TrainingArguments):  # type: ignore[misc]
    """Everything of `TrainingArguments`. On a machine without accelerator, gloo on CPU is set up first."""

    accelerate_config: str | None = field(
        default=None,
        metadata={
            "help": "The Accelerate YAML, under torchrun (the number of processes is torchrun's) and on TPU. "
            "Under accelerate launch it is --config_file instead."
        },
    )

    def __post_init__(self) -> None:
        if cpu.deepspeed_requested():  # Trainer stops where its own flags differ from what the YAML told DeepSpeed
            precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
            self.bf16, self.fp16 = precision == "bf16", precision == "fp16"
        if self.fsdp:  # type: ignore[has-type]
            raise UsageError(
                "--fsdp is set besides the YAML",
                why="Trainer would then ignore most of the YAML's FSDP settings, silently",
                fix="leave out --fsdp and --fsdp_config; the YAML decides",
            )
        if self.accelerate_config is not None and (settings := xla_settings(Path(self.accelerate_config))):
            self.fsdp = True
            self.fsdp_config = settings
        if cpu.enable():
            self.use_cpu = True
            cpu.init_process_group(self.ddp_timeout)
        super().__post_init__()


def xla_settings(path: Path) -> dict[str, Any]:
    """What `TrainingArguments.fsdp_config` needs of a TPU YAML; empty for every other engine.

    Accelerate's launcher takes these keys and hands them to nobody (1.15).

    Raises:
        UserError: the file can't be read.
    """
    content = config.load(path)
    if content.get("distributed_type") != "XLA":
        return {}
    section = content.get("fsdp_config") or {}
    settings = {str(key).removeprefix("fsdp_"): value for key, value in section.items()}
    if isinstance(names := settings.get("transformer_layer_cls_to_wrap"), str):
        settings["transformer_layer_cls_to_wrap"] = names.split(",")
    return settings


def parse() -> tuple[ModelArguments, DataArguments, SftArguments]:
    """Parses the command line of `train/sft.py`.

    Raises:
        UsageError: an unknown flag, a missing one, or a bad value.
    """
    parser = _Parser([ModelArguments, DataArguments, SftArguments], allow_abbrev=False)
    _require_launcher()
    known = {option for action in parser._actions for option in action.option_strings}
    for flag in (word.split("=")[0] for word in sys.argv[1:] if word.startswith("--")):
        if flag not in known:
            raise UsageError(
                f"unknown argument {flag}.{did_you_mean(flag, known)}", why="it has no effect", fix=SEE_HELP
            )
    try:
        model, data, training = parser.parse_args_into_dataclasses()
    except ValueError as error:
        raise UsageError(str(error).splitlines()[0], why="Trainer refuses these arguments", fix=SEE_HELP) from error
    if data.max_length < 2:
        raise UsageError(f"--max_length {data.max_length} is too short", why="nothing is left to predict", fix=SEE_HELP)
    if model.load_in_4bit and not model.use_peft:
        raise UsageError(
            "--load_in_4bit without --use_peft", why="4-bit weights can't be trained, only adapters", fix="--use_peft"
        )
    if model.use_dora and not model.use_peft:
        raise UsageError("--use_dora without --use_peft", why="DoRA is a kind of adapter", fix="--use_peft")
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
    return model, data, training


class _Parser(HfArgumentParser):  # type: ignore[misc]
    def error(self, message: str) -> NoReturn:
        """argparse would print 150 flags before the one line that matters."""
        raise UsageError(message, why="the job can't start with these arguments", fix=SEE_HELP)


def _require_launcher() -> None:
    """Makes sure that an Accelerate YAML decides: the launcher's, or under torchrun that of `--accelerate_config`.

    Raises:
        UserError: there is no YAML, two decide, or nothing started this process as one rank of a job.
    """
    file = _word_after("--accelerate_config")
    if {"-h", "--help"} & set(sys.argv) or (file is not None and xla_settings(Path(file))):
        return  # the TPU launcher sets no variable; Trainer reads these settings itself
    launched = "ACCELERATE_MIXED_PRECISION" in os.environ
    if launched and file is not None:
        raise UsageError(
            "--accelerate_config under accelerate launch",
            why="the launcher has its own --config_file, and only one of them can decide",
            fix="leave it out, or start with torchrun",
        )
    if file is not None and cpu.is_distributed_launch():
        os.environ.update(jobs.rank_environment(Path(file), Path(sys.argv[0])))
    elif not launched:
        raise UserError(
            "not started by accelerate launch or torchrun",
            why="no FSDP setting is read without them, and the model would train unsharded",
            fix="accelerate launch --config_file FILE.yaml train/sft.py ..., or torchrun --standalone "
            "--nproc-per-node N train/sft.py --accelerate_config FILE.yaml ... (accel-fsdp config makes FILE.yaml)",
        )


def _word_after(flag: str) -> str | None:
    """The value of a flag that is needed before the command line can be parsed."""
    for word, following in zip(sys.argv, [*sys.argv[1:], ""], strict=True):
        if word == flag or word.startswith(f"{flag}="):
            return word.partition("=")[2] or following
    return None


def checkpoint_to_resume(training: SftArguments) -> str | None:
    """Resolves `--resume_from_checkpoint` (a folder, or true for the newest of `output_dir`).

    Raises:
        UserError: there is nothing to resume from, or `output_dir` holds another run that would be mixed up with this.
    """
    output = Path(training.output_dir)
    newest = _newest_complete(output)
    wanted = training.resume_from_checkpoint
    if wanted is None or str(wanted).lower() == "false":
        if any(output.glob("checkpoint-*")) or (output / "final").exists():
            raise UserError(
                f"{output} already holds a run",
                why="its checkpoints and this run's would be mixed up",
                fix="--resume_from_checkpoint true to go on with it, or another --output_dir",
            )
        return None
    if str(wanted).lower() == "true":
        if newest is None:
            raise UserError(
                f"no complete checkpoint-N folder in {output}",
                why="there is nothing to resume from",
                fix="leave out --resume_from_checkpoint to start anew, or correct --output_dir",
            )
        return str(newest)
    if not _is_complete(Path(wanted)):
        raise UserError(
            f"{wanted} is not a complete checkpoint",
            why="it lacks trainer_state.json, which Trainer writes last, or the .metadata of its shards",
            fix=f"--resume_from_checkpoint {newest or 'FOLDER/checkpoint-N'}",
        )
    return str(wanted)


def _newest_complete(output: Path) -> str | None:
    """The complete checkpoint-N with the highest number; Trainer itself would take a half-written one."""
    complete = [path for path in checkpoints(output) if _is_complete(path)]
    return str(complete[-1]) if complete else None


def _is_complete(checkpoint: Path) -> bool:
    """Trainer writes trainer_state.json last, and torch the .metadata of a sharded folder."""
    sharded = [checkpoint / name for name in ("pytorch_model_fsdp_0", "optimizer_0") if (checkpoint / name).is_dir()]
    return (checkpoint / "trainer_state.json").is_file() and all((path / ".metadata").is_file() for path in sharded)
