"""What `train/sft.py` is made of: a Trainer that checks its sharding, resumes in full and exports."""

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from accel_fsdp import cpu, export, facts, files, papers, prepare, render, sharding
from accel_fsdp.arguments import SEE_HELP
from accel_fsdp.errors import UserError


class SftTrainer(Trainer):  # type: ignore[misc]
    """`Trainer` that refuses unsharded training, resumes FSDP1's optimizer, and exports a verified folder."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        model = kwargs["model"]
        self.use_cache = getattr(model.config, "use_cache", None)
        prepare.before_trainer(model, kwargs["args"])
        if kwargs["args"].process_index == 0:
            self.lock = files.only_run(Path(kwargs["args"].output_dir))
            papers.describe(model, kwargs.get("processing_class"), Path(kwargs["args"].output_dir) / papers.DESCRIBED)
        try:
            super().__init__(*args, **kwargs)
        except (ValueError, ImportError) as error:
            raise UserError(
                f"Trainer refuses this combination: {facts.first_line(error)}", why="training can't start", fix=SEE_HELP
            ) from error
        self.add_callback(prepare.HostMemory())
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if plugin is not None:
            prepare.keep_buffers(plugin)
            self.add_callback(ShardingCheck())
        elif self.accelerator.is_main_process:
            kind = self.accelerator.distributed_type.value
            render.say(f"{kind}: no FSDP, as the YAML says; each rank may hold the whole model", style="yellow")
        self.expected = export.expected_tensors(model, self._trained_as())

    def _trained_as(self) -> torch.dtype | None:
        """Mixed precision: FSDP trains float32 master weights, DeepSpeed a 16-bit model beside its own."""
        precision = self.accelerator.mixed_precision
        if getattr(self.accelerator.state, "deepspeed_plugin", None) is not None:
            return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
        fsdp = getattr(self.accelerator.state, "fsdp_plugin", None) is not None
        return torch.float32 if fsdp and precision != "no" else None

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Creates FSDP1's optimizer state before loading into it.

        A fresh optimizer offers no state to fill, so `FSDP.optim_state_dict` asks the checkpoint for nothing and Adam
        restarts from zero, silently (accelerate 1.15). FSDP2's path creates it with this same function of torch.
        """
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if checkpoint is not None and plugin is not None and plugin.fsdp_version == 1:
            from torch.distributed.checkpoint.state_dict import _init_optim_state

            _init_optim_state(self.optimizer.optimizer)
        with _unreadable_checkpoint(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        with _unreadable_checkpoint(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model=model)

    def export(self, target: Path) -> int:
        """Gathers the full model (or adapter) and writes it to `target`; returns the number of tensors written.

        Call on all ranks. `target` appears complete and verified, or not at all.

        Raises:
            UserError: what was written is not what was trained, or can't be written.
        """
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if plugin is not None:
            plugin.set_state_dict_type("FULL_STATE_DICT")
        if self.use_cache is not None:  # Trainer turned it off; the export is for inference
            self.model.config.use_cache = self.use_cache
        writes = self.args.should_save  # rank 0, or one rank per node with --save_on_each_node
        place = files.replaced_folder(target) if writes else contextlib.nullcontext(target)
        with place as folder:
            self.save_model(str(folder))
            return export.verify(folder, self.expected) if writes else 0

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        if state_dict is not None:
            state_dict = export.without_tied_copies(state_dict, self.expected.ties)
        super()._save(output_dir, state_dict=state_dict)


class ShardingCheck(TrainerCallback):  # type: ignore[misc]
    """Stops a run whose parameters are not sharded although the YAML asks for it, before the first step."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Measures the wrapped model and says what each rank holds."""
        strategy = os.environ.get("FSDP_SHARDING_STRATEGY", "").upper()
        no_shard = os.environ.get("FSDP_VERSION") == "1" and strategy in ("3", "NO_SHARD")
        ignores = bool(os.environ.get("FSDP_IGNORED_MODULES"))
        report = sharding.measure(kwargs["model"], allow_unsharded=ignores)
        if report.shard_ranks == 1 and args.world_size > 1 and not no_shard:
            raise sharding.unsharded("its shards are shared by one rank only")
        if state.is_world_process_zero:
            render.say(f"sharding: {report}", style="cyan")


@contextlib.contextmanager
def _unreadable_checkpoint(folder: str | None) -> Iterator[None]:
    """Turns the ways in which a checkpoint fails to load into one message."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except (OSError, RuntimeError, ValueError, KeyError, CheckpointException) as error:
        raise UserError(
            f"cannot resume from {folder}: {facts.first_line(error)}",
            why="the checkpoint is incomplete, or was written with other model, LoRA or state dict settings",
            fix="resume with the flags and the YAML of that run, or from an older checkpoint-N",
        ) from error


def finish(exit_code: int) -> None:
    """Ends the process group, and on CPU the process (see `cpu.finish`).

    After a failure the other ranks may be inside a collective, and ending the group would wait for them.
    """
    cpu.finish(exit_code)
    if exit_code == 0 and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def quiet(process_index: int) -> None:
    """Progress bars of one rank are enough; and torch's advice about FSDP1's API is not for the user of this script."""
    warnings.filterwarnings("ignore", message="FSDP.state_dict_type", category=FutureWarning)
    if process_index != 0:
        import datasets
        from transformers.utils import logging

        logging.disable_progress_bar()
        datasets.disable_progress_bars()


def summary(log_history: list[dict[str, float]]) -> list[str]:
    """The first and last value of each loss that Trainer logged, one line each."""
    lines = []
    for key, name in (("loss", "training loss"), ("eval_loss", "held-out loss")):
        values = [float(entry[key]) for entry in log_history if key in entry]
        if values:
            lines.append(f"{name}: {values[0]:.4f} -> {values[-1]:.4f}")
    return lines
