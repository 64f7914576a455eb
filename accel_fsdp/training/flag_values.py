"""Refuses invalid values of flags before anything is read: ranges, optimizers, schedules, combinations.

Trainer checks few of its flags, and late: a batch size of 0, an optimizer whose package isn't installed or that FSDP2
can't run ends in a traceback, after data and model were loaded.
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Trainer, TrainingArguments, get_scheduler
from transformers.utils import is_liger_kernel_available

from accel_fsdp.checkpoints import Store
from accel_fsdp.config import EXPERT_FIELD, Engine
from accel_fsdp.errors import UsageError, UserError, did_you_mean
from accel_fsdp.exporter import hub
from accel_fsdp.job import Job, Layout, Recipe, combinations, from_run, from_yaml
from accel_fsdp.launch_environment import LaunchEnvironment
from accel_fsdp.models import first_line
from accel_fsdp.training import mesh
from accel_fsdp.training.reporting import profiling

UNSHARDED = ("lora_modules_to_save",)
LARGEST_SEED = 2**32 - 1
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@dataclass(frozen=True)
class Bounds:
    """The range of a finite number: from `least` on (above it if `open`) to below `under`."""

    least: float = 0
    under: float = math.inf
    open: bool = False

    def __contains__(self, value: float) -> bool:
        return (value > self.least if self.open else value >= self.least) and value < self.under

    def __str__(self) -> str:
        start = f"more than {self.least:g}" if self.open else f"{self.least:g} or more"
        return start + ("" if self.under == math.inf else f" and less than {self.under:g}")


COUNT, SIZE, SHARE, ABOVE = Bounds(1), Bounds(), Bounds(under=1), Bounds(open=True)
RANGES = {
    **dict.fromkeys(
        (
            *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "lora_r"),
            *("eval_accumulation_steps", "torch_empty_cache_steps", "dataloader_prefetch_factor", "ddp_timeout"),
            *("streaming_buffer", "dataset_num_proc", "save_total_limit", EXPERT_FIELD),
        ),
        COUNT,
    ),
    **dict.fromkeys(("warmup_steps", "dataloader_num_workers", "eval_delay", "learning_rate", "weight_decay"), SIZE),
    **dict.fromkeys(("max_grad_norm", "neftune_noise_alpha", "hang_timeout", "upload_timeout"), SIZE),
    **dict.fromkeys(("label_smoothing_factor", "lora_dropout", "adam_beta1", "adam_beta2"), SHARE),
    **dict.fromkeys(
        ("adam_epsilon", "logging_steps", "eval_steps", "save_steps", "num_train_epochs", "lora_alpha"), ABOVE
    ),
    **dict.fromkeys(("seed", "data_seed"), Bounds(under=LARGEST_SEED + 1)),
}


def check(model: Any, data: Any, training: TrainingArguments) -> None:
    for group in (model, data, training):
        for name, allowed in RANGES.items():
            value = getattr(group, name, None)
            has_effect = name != "num_train_epochs" or training.max_steps < 1
            if isinstance(value, (int, float)) and value not in allowed and has_effect:
                raise UsageError(f"--{name} {value}", why=f"it has to be {allowed}", fix=f"--{name} with such a number")
    if training.max_steps < 1 and training.max_steps != -1:
        raise UsageError(
            f"--max_steps {training.max_steps}", why="it has to be 1 or more", fix="leave it out to train epochs"
        )
    if training.dataloader_persistent_workers and not training.dataloader_num_workers:
        raise UsageError(
            "--dataloader_persistent_workers without workers",
            why="there are none to keep",
            fix="--dataloader_num_workers N",
        )
    if training.use_liger_kernel and not is_liger_kernel_available():
        raise UserError(
            "--use_liger_kernel, and the package isn't installed",
            why="there is no kernel to use",
            fix="pip install liger-kernel, or leave it out",
        )
    if training.use_liger_kernel and LaunchEnvironment.now().by_transformers:
        raise UsageError(
            "--use_liger_kernel with tensor or expert parallelism",
            why="its loss takes the whole head, of which each rank has a part",
            fix="leave it out",
        )
    if training.checkpoint_uri:
        Store(training.checkpoint_uri)  # raises if it can't be one
    if training.push_to_hub and LaunchEnvironment.now().rank == 0:
        hub.check_login(training.hub_token)
    mode = training.torch_compile_mode
    if mode is not None and mode not in COMPILE_MODES:
        raise UsageError(
            f"--torch_compile_mode {mode}.{did_you_mean(mode, COMPILE_MODES)}",
            why="torch.compile has no such mode",
            fix="one of " + ", ".join(COMPILE_MODES),
        )
    if training.profile_steps is not None:
        profiling.steps_of(training.profile_steps)
    _check_unsharded(model)
    _check_combination(model, training)
    _check_optimizer(training)


def _check_unsharded(model: Any) -> None:
    """Refuses adapters with more than LoRA's own matrices, which are tested only in one process and under DDP."""
    engine = from_run.engine_here()
    if engine not in (Engine.NONE, Engine.DDP):
        for name in UNSHARDED:
            if getattr(model, name, None):
                raise UserError(
                    f"--{name} under {engine.label}",
                    why="it hasn't been shown to train, save and resume there, and a run with it may hang",
                    fix="leave it out, or distributed_type: MULTI_GPU, where the base fits on one GPU",
                )


def _check_combination(model: Any, training: TrainingArguments) -> None:
    enabled = {name for name in combinations.FLAGS if getattr(model, name, False)}
    launch = LaunchEnvironment.now()
    job = Job(
        mesh.layout_here() if launch.by_transformers else Layout(from_run.engine_here()),
        Recipe(model.method, precision=from_yaml.PRECISIONS.get(launch.mixed_precision, "no")),
        optimizer=str(getattr(training.optim, "value", training.optim)),
        recompute="engine" if launch.recomputes_units else "script" if training.gradient_checkpointing else "none",
        state_dict=launch.state_dict_type,
        flags=frozenset(enabled | ({"label_smoothing_factor"} if training.label_smoothing_factor else set())),
    )
    saves = str(getattr(training.save_strategy, "value", training.save_strategy)) != "no"
    for clash in combinations.clashes(job):
        if not clash.mended and (saves or clash.effect != "stops when it saves"):
            raise UserError(f"{clash.what} ({job.engine.label})", why=clash.why, fix=clash.fix)


def _check_optimizer(training: TrainingArguments) -> None:
    """Builds the optimizer and the schedule for a parameter of one number, as Trainer will for the model."""
    name = str(getattr(training.optim, "value", training.optim))
    with _convert_errors(f"--optim {name}"):
        try:
            kind, options = Trainer.get_optimizer_cls_and_kwargs(training, None)
        except ImportError as error:
            raise UserError(
                f"--optim {name} needs a package that isn't installed: {first_line(error)}",
                why="there is no such optimizer here",
                fix=f"pip install it, or {combinations.ADAMW}",
            ) from error
        except (ValueError, AttributeError) as error:
            if name.startswith(("galore", "apollo", "lomo", "adalomo")):  # they want the model: it doesn't exist yet
                return
            raise error
        optimizer = kind([torch.nn.Parameter(torch.zeros(1))], **options)
    schedule = str(getattr(training.lr_scheduler_type, "value", training.lr_scheduler_type))
    with _convert_errors(f"--lr_scheduler_type {schedule}"):
        get_scheduler(
            schedule,
            optimizer,
            num_warmup_steps=training.get_warmup_steps(1000),
            num_training_steps=1000,
            scheduler_specific_kwargs=training.lr_scheduler_kwargs,
        )


@contextlib.contextmanager
def _convert_errors(flag: str) -> Iterator[None]:
    """Converts the errors of torch or a package about a value into a UserError."""
    try:
        yield
    except (ValueError, TypeError, AssertionError, AttributeError, KeyError) as error:
        raise UsageError(
            f"{flag} with its settings can't be made: {first_line(error)}",
            why="the first step would stop",
            fix="correct the named flag, or one of --optim_args, --lr_scheduler_kwargs, --warmup_steps",
        ) from error


TRL = {
    "activation_offloading": "--gradient_checkpointing true, or fsdp_offload_params: true in the YAML",
    "config": "write the arguments on the command line; the YAML of --config_file is Accelerate's",
    "dataset_kwargs": "leave it out: chat templates and end tokens are handled by the kind of the rows",
    "dataset_streaming": "--streaming true --max_steps N",
    "eval_packing": "leave it out: the evaluation split is packed as the training split is",
    "evaluation_strategy": "--eval_strategy",
    "group_by_length": "--train_sampling_strategy group_by_length",
    "load_in_8bit": "--load_in_4bit true (QLoRA); FSDP1 can't shard an 8-bit base",
    "lora_target_parameters": "--lora_target_modules: linear layers alone; experts that are not modules stay frozen",
    "lora_task_type": "leave it out: this script trains causal language models alone",
    "loss_type": "leave it out: the loss is TRL's nll, the mean over all tokens of all processes",
    "max_seq_length": "--max_length",
    "model_init_kwargs": "--dtype, --attn_implementation, --model_revision or --trust_remote_code",
    "packing_strategy": "--packing true: best-fit decreasing, no row is cut (TRL's bfd; wrapped has no counterpart)",
    "padding_free": "--packing true, which knows no padding; or --train_sampling_strategy group_by_length",
    "pad_to_multiple_of": "leave it out: rows are padded to the longest of a batch; --packing true saves that",
    "per_gpu_train_batch_size": "--per_device_train_batch_size",
    "router_aux_loss_coef": "router_aux_loss_coef and output_router_logits: true in the model's config.json",
    "shuffle_dataset": "leave it out: rows are shuffled, unless --train_sampling_strategy sequential",
    "torch_dtype": "--dtype",
    "use_bnb_nested_quant": "leave it out: only --bnb_4bit_quant_type and --bnb_4bit_quant_storage are supported",
    "use_liger": "--use_liger_kernel true",
    "warmup_ratio": "--warmup_steps with the share, such as 0.1",
}
"""Flags of TRL and of older Trainers, without dashes, and what to type here."""
