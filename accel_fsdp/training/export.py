"""Exports a model at the end of a run: all ranks gather it, the first one writes and verifies it."""

import contextlib
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from accel_fsdp import atomic_files, disks, exporter, models
from accel_fsdp.checkpoints import completeness, file_names
from accel_fsdp.errors import UserError
from accel_fsdp.exporter import exported_folder
from accel_fsdp.hardware import host
from accel_fsdp.library_internals import Internal
from accel_fsdp.models import state_bytes
from accel_fsdp.training import load_model, mesh_checkpoints
from accel_fsdp.units import counted, distinguishable, gib_or_mib

RELIES_ON = (Internal("torch.distributed.distributed_c10d:_world.pg_map"),)
SLOWEST_BYTES_PER_S = 50e6
"""The rate of a busy network file system; a local disk is 10 to 60 times as fast."""


class Export:
    """The export of a run. Make it before training; `expected` describes the folder's content."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.args, model = trainer, trainer.args, trainer.model
        self.dtype = self._dtype(model)
        saved_as = getattr(torch, self.dtype) if self.dtype else None
        with mesh_checkpoints.as_whole(model) if trainer.by_transformers else contextlib.nullcontext():
            self.expected = exported_folder.expected_tensors(model, self._trained_as(), saved_as)
        self.is_writing = False
        """Whether Trainer's saves are the export instead of a checkpoint."""

    def _dtype(self, model: Any) -> str:
        """The name of the dtype to export in; empty: as trained, which is the default of an adapter."""
        if self.args.export_dtype != "auto":
            return str(self.args.export_dtype)
        if hasattr(model, "peft_config"):
            return ""
        revision = getattr(model.config, "_commit_hash", None) or "main"
        return models.stored_dtype(model.config._name_or_path, revision, model.config.is_remote_code())

    def _trained_as(self) -> torch.dtype | None:
        """The dtype under mixed precision: FSDP trains float32 masters, DeepSpeed a 16-bit model beside its masters."""
        precision, state = self.trainer.accelerator.mixed_precision, self.trainer.accelerator.state
        if getattr(state, "deepspeed_plugin", None) is not None:
            return load_model.COMPUTED.get(precision)
        return torch.float32 if self.trainer.is_sharded and precision != "no" else None

    def write(self, target: Path, card: str) -> int:
        """Writes the model, gathered or from a checkpoint; returns the number of tensors. Call on all ranks.

        Raises:
            UserError: the host lacks memory to gather it; the files differ from the trained model, or can't be written.
        """
        trainer = self.trainer
        writes = self.args.should_save  # rank 0, or one rank per node with --save_on_each_node
        plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
        if trainer.is_sharded or trainer.is_deepspeed_enabled:
            if self.args.final_export == "stream":
                return self._stream(target, card)
            check_host_memory(self.expected.gathered_bytes, writes, target, self._kept_checkpoint)
        if plugin is not None:
            plugin.set_state_dict_type("FULL_STATE_DICT")
        self._lengthen_timeouts()
        if trainer.use_cache is not None:  # Trainer turned it off; the export is for inference
            trainer.model.config.use_cache = trainer.use_cache
        self.is_writing = True
        tensors = self._write_here(target, card) if writes else 0
        if not writes:
            trainer.save_model(str(target))  # the other ranks take part in the gather
        self.is_writing = False
        trainer.accelerator.wait_for_everyone()
        return tensors

    def _stream(self, target: Path, card: str) -> int:
        """Exports the checkpoint of the current weights on rank 0, which holds some blocks of tensors at a time."""
        checkpoint = self._kept_checkpoint()
        self._lengthen_timeouts()
        tensors = 0
        if self.args.process_index == 0:
            options = exporter.ExportCommand(checkpoint, target, dtype=self.dtype or None, force=True)
            tensors = len(exporter.exported(options).tensors)
            atomic_files.write_text(target / file_names.CARD, card)
        self.trainer.accelerator.wait_for_everyone()
        return tensors

    def _lengthen_timeouts(self) -> None:
        lengthen_timeouts(self.expected.gathered_bytes, self.args.ddp_timeout)

    def _write_here(self, target: Path, card: str) -> int:
        with atomic_files.replaced_folder(target) as folder:
            try:
                self.trainer.save_model(str(folder))
                exported_folder.finish(folder, self.dtype, card)
            except Exception as error:
                if not (full := disks.full(error, folder)):
                    raise
                newest = completeness.choose(target.parent).newest
                retry = f", then: accel-fsdp export {newest} {target}" if newest else ""
                raise UserError(
                    f"cannot write {target}: {full}",
                    why="training finished, but the export failed",
                    fix=f"free some space{retry}",
                ) from error
            return exported_folder.verify(folder, self.expected)

    def _kept_checkpoint(self) -> Path:
        """The checkpoint of the current weights; written in shards if there is none. Call on all ranks."""
        trainer = self.trainer
        if self.args.load_best_model_at_end and trainer.state.best_model_checkpoint:
            return Path(trainer.state.best_model_checkpoint)
        folder = Path(self.args.output_dir) / f"{file_names.CHECKPOINT}{trainer.state.global_step}"
        exists = folder.is_dir()
        trainer.accelerator.wait_for_everyone()  # before a rank creates the folder by saving
        if not exists:
            if (plugin := getattr(trainer.accelerator.state, "fsdp_plugin", None)) is not None:
                plugin.state_dict_config = plugin.optim_state_dict_config = None  # otherwise the old ones stay
                plugin.set_state_dict_type("SHARDED_STATE_DICT")
            trainer._save_checkpoint(trainer.model, trial=None)
            trainer.checkpoints.wait()
        return folder

    def as_exported(self, state_dict: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor] | None:
        """The tensors that Trainer writes: in the export's dtype, without copies of tied tensors."""
        if self.is_writing and self.args.should_save and self.expected.casts:
            if state_dict is None:
                state_dict = self.trainer.accelerator.unwrap_model(self.trainer.model).state_dict()
            state_dict = exported_folder.cast(state_dict, self.expected.casts)
        return None if state_dict is None else exported_folder.without_tied_copies(state_dict, self.expected.ties)


def exported(target: Path, tensors: int, rounding: exported_folder.Rounding | None) -> str:
    """The line that names the export, and reports if its weights were rounded."""
    rounded = f", {rounding}; --export_dtype {rounding.trained} keeps them" if rounding else ""
    return f"exported and verified: {target} ({counted(tensors, 'tensor')}{rounded})"


def check_host_memory(gathered_bytes: int, gathers_here: bool, target: Path, checkpoint: Callable[[], Path]) -> None:
    """Stops all ranks before a gather if one of them lacks memory, because the kernel would kill it. Collective.

    `gathers_here` says that this rank will hold the whole model. `checkpoint` makes sure that a checkpoint is on disk,
    on all ranks.
    """
    free = host.free_memory() if gathers_here else None
    needed = state_bytes.gathering_bytes(gathered_bytes)
    is_short = free is not None and needed > free
    free_of_ranks: list[int | None] = [free if is_short else None]
    if dist.is_initialized():
        free_of_ranks = [None] * dist.get_world_size()
        dist.all_gather_object(free_of_ranks, free if is_short else None)
    least_free = min((free for free in free_of_ranks if free is not None), default=None)
    if least_free is None:
        return
    saved, (takes, available) = checkpoint(), distinguishable(gib_or_mib, needed, least_free)
    raise UserError(
        f"the whole model takes {takes} of host memory, {available} are free",
        why=f"the system would end the process that gathers it; nothing is lost, {saved.name} holds what was trained",
        fix=f"accel-fsdp export {saved} {target}, which needs memory for one tensor at a time; "
        "in the next run train/sft.py --final_export stream",
    )


def lengthen_timeouts(model_bytes: int, least_seconds: float) -> float:
    """Gives the collectives of all groups the time that writing the model may take; returns it in seconds.

    The other ranks wait in a collective while the first rank writes, and the watchdog's default of 10 or 30 minutes
    would end them. Never shorter than `least_seconds`, the job's own. Call on all ranks.
    """
    seconds = max(least_seconds, model_bytes / SLOWEST_BYTES_PER_S)
    if dist.is_initialized():
        from torch.distributed.distributed_c10d import _world

        dist.barrier()  # pending collectives keep their own timeout
        for group in list(_world.pg_map):
            group.set_timeout(timedelta(seconds=seconds))
    return seconds
