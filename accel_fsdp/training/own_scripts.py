"""`accel_fsdp.Checkpoints`: those of `train/sft.py`, for any script with Trainer and any loop with Accelerate."""

import sys
import weakref
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from accelerate import Accelerator
from transformers import Trainer

from accel_fsdp import atomic_files, console, library_internals
from accel_fsdp.checkpoints import file_names, marker
from accel_fsdp.errors import Stopped, UsageError, UserError
from accel_fsdp.exporter import companion_files
from accel_fsdp.launch_environment import LaunchEnvironment
from accel_fsdp.training import (
    background_saves,
    loading,
    preemption,
    resuming,
    safe_checkpoints,
    uploads,
)
from accel_fsdp.training.hang_watch import HangWatch
from accel_fsdp.training.preemption import Stop
from accel_fsdp.training.reporting import History
from accel_fsdp.training.safe_checkpoints import SafeCheckpoints
from accel_fsdp.training.saving import CheckpointWriter
from accel_fsdp.units import counted

UNWATCHED = 0.0
"""The hang timeout of scripts of others: `accel-fsdp launch` watches them."""


class Checkpoints:
    """Checkpoints that are whole or don't exist, resumed on any number of ranks, and saved when a job is preempted.

    For a Trainer this is all:

        accel_fsdp.Checkpoints(trainer, async_checkpoints=True, checkpoint_uri="s3://bucket/run")
        trainer.train(resume_from_checkpoint="auto")

    A loop with Accelerate calls `resume` once, after `prepare`; `stopping` after each step, `save` where it saves, and
    `finish` at its end, all of them on all ranks.

    Create it after Trainer, or after Accelerator, on all ranks. SIGTERM, SIGUSR1 and Ctrl-C save a checkpoint, and end
    the script with code 75.
    """

    def __init__(
        self,
        run: Trainer | Accelerator,
        output_dir: str | Path | None = None,
        *,
        keep: int | None = None,
        async_checkpoints: bool = False,
        checkpoint_uri: str | None = None,
        upload_timeout: float = 600.0,
    ) -> None:
        """`output_dir` and `keep`, the number of checkpoints, are those of a Trainer's own arguments.

        Raises:
            UserError: an argument can't be used.
        """
        modules = (safe_checkpoints, background_saves, loading, preemption, uploads)
        used = (internal for module in modules for internal in module.RELIES_ON)
        library_internals.check(*used, why="checkpoints depend on it")
        flags = {
            "async_checkpoints": async_checkpoints,
            "checkpoint_uri": checkpoint_uri,
            "upload_timeout": upload_timeout,
        }
        self._loop: _Loop | None = None
        if isinstance(run, Trainer):
            if output_dir is not None or keep is not None:
                raise UsageError(
                    "output_dir or keep for a Trainer",
                    why="its arguments have them",
                    fix="TrainingArguments(output_dir=..., save_total_limit=...)",
                )
            _attach(run, flags)
        elif output_dir is None:
            raise UsageError("no output_dir", why="there is nowhere to save", fix="Checkpoints(accelerator, FOLDER)")
        else:
            self._loop = _Loop(run, _Arguments.of(run, Path(output_dir), keep, **flags))
            self._writer = CheckpointWriter(self._loop, History({}), sizes=(0, 0))

    def resume(self) -> int:
        """Loads the newest complete checkpoint, here or in the store; returns its step, and 0 if there is none.

        Raises:
            UserError: it can't be loaded, or the store can't be reached.
        """
        loop = self._of_loop()
        folder = resuming.newest(loop.args)
        if folder is not None:
            self._check_engine(folder)
            loading.accelerator_state(loop, str(folder))
            if loop.args.process_index == 0:
                console.say(f"resumed: {folder}", style="cyan")
        loop.lock = atomic_files.only_run(Path(loop.args.output_dir)) if loop.args.process_index == 0 else None
        if self._writer.uploads is not None:
            self._writer.uploads.begin()
        loop.stop.on_train_begin(loop.args, loop.state, None)
        loop.is_resumed = True
        return 0 if folder is None else file_names.step(folder.name)

    def _check_engine(self, folder: Path) -> None:
        written, here = marker.origin_of(folder), self._writer.origin()
        if written is None:
            return
        ranks = resuming.partitions_of_zero(folder)
        if written.engine == here.engine and ranks in (0, here.ranks):
            return
        how = resuming.how_to_convert(
            folder, {written.engine, here.engine}, here, 'Checkpoints(accelerator, "NEW_RUN")'
        )
        was = f"{written.engine} on {counted(ranks or written.ranks, 'rank')}"
        raise UserError(
            f"{folder} was written under {was}, this run is under {here.engine} on {here.ranks}",
            why="they store weights and optimizer differently"
            if written.engine != here.engine
            else "each rank has its own file",
            fix=f"a YAML for {was}" + (f"; or {how}" if how else "; or a new run in another folder"),
        )

    def stopping(self, step: int) -> bool:
        """Whether a signal asks for the end of the loop after this step: save, and leave the loop."""
        loop = self._of_loop()
        loop.state.global_step = step
        loop.stop.on_step_end(loop.args, loop.state, SimpleNamespace())
        return bool(loop.stop.agreed)

    def save(self, step: int) -> Path:
        """Saves what `Accelerator.save_state` saves, after `step` steps; returns the folder.

        Raises:
            UserError: the disk is full, or a library failed; the checkpoint is gone then, and the last one stays.
        """
        loop = self._of_loop()
        if not loop.is_resumed:
            raise UsageError("save before resume", why="an earlier run would be overwritten", fix="resume() first")
        loop.state.global_step = step
        folder = self._writer.folder()
        self._writer.save(None, lambda: loop.accelerator.save_state(str(folder)))
        return folder

    def finish(self) -> None:
        """Waits until the last checkpoint is complete and uploaded; ends the script with code 75 after a signal.

        Raises:
            UserError: the checkpoint couldn't be written or uploaded.
        """
        loop = self._of_loop()
        try:
            self._writer.wait()
            if loop.stop.agreed:
                loop.stop.ignore()
                left = self._writer.upload_rest()
                rest = f"; not uploaded: {left}" if left else ""
                _end(f"{loop.stop.agreed} after step {loop.state.global_step}", f"saved: {self._writer.folder()}{rest}")
            self._writer.require_uploaded()
        finally:
            loop.stop.release()

    def _of_loop(self) -> "_Loop":
        if self._loop is None:
            raise UsageError(
                "a method of Checkpoints for a Trainer",
                why="the Trainer saves and resumes by itself",
                fix="trainer.train(resume_from_checkpoint='auto')",
            )
        return self._loop


def _end(what: str, why: str) -> NoReturn:
    stopped = Stopped(what, why=why, fix="the same command again, which resumes")
    if LaunchEnvironment.now().rank == 0:
        console.say(str(stopped), lines=True)
    sys.exit(Stopped.exit_code)


def _attach(trainer: Any, flags: dict[str, Any]) -> None:
    """Makes a Trainer one with `SafeCheckpoints`, whatever its class is."""
    vars(trainer.args).update(flags)
    if not isinstance(trainer, _OwnTrainer):
        trainer.__class__ = type(type(trainer).__name__, (_OwnTrainer, type(trainer)), {})
    run = weakref.proxy(trainer)
    trainer.stop, trainer.watch = Stop(), HangWatch(UNWATCHED, Path(trainer.args.output_dir))
    trainer.checkpoints = CheckpointWriter(run, History({}))
    trainer.add_callback(trainer.stop)
    if trainer.args.process_index == 0:
        described = Path(trainer.args.output_dir) / file_names.DESCRIBED
        companion_files.describe(trainer.model, trainer.processing_class, described)


class _OwnTrainer(SafeCheckpoints):
    """What a user's Trainer gets besides: the choice of the checkpoint, the checks before a step, and the end."""

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Trains as its class does; True and "auto" take the newest complete checkpoint, here or in the store."""
        asked = resume_from_checkpoint not in (None, False)
        self.args.resume_from_checkpoint = str(resume_from_checkpoint) if asked else None
        folder = resuming.newest(self.args)
        if folder is not None:
            resuming.keep_batch_size(folder, self.args)
            self._train_batch_size = self.args.train_batch_size
            resuming.check(folder, self.checkpoints.origin(), skips_data=not self.args.ignore_data_skip)
        self.lock = atomic_files.only_run(Path(self.args.output_dir)) if self.args.process_index == 0 else None
        try:
            result = super().train(None if folder is None else str(folder), *args, **kwargs)
            self.checkpoints.require_uploaded()
            return result
        except Stopped as stopped:
            self.stop.ignore()
            _end(stopped.what, stopped.why)
        finally:
            self.checkpoints.complete_last()
            self.stop.release()
            if self.lock is not None:
                self.lock.release()

    def _init_training_state(self, *args: Any, **kwargs: Any) -> Any:
        place = super()._init_training_state(*args, **kwargs)
        self.checkpoints.check_room()
        return place

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self.end_of_checkpoints()
        return super()._finalize_training(*args, **kwargs)


@dataclass
class _Arguments:
    """Those of `TrainingArguments` and `SftArguments` that checkpoints depend on."""

    output_dir: str
    save_total_limit: int | None
    async_checkpoints: bool
    checkpoint_uri: str | None
    upload_timeout: float
    process_index: int
    local_process_index: int
    world_size: int
    resume_from_checkpoint: str = "auto"
    save_on_each_node: bool = False
    ignore_data_skip: bool = False
    ddp_timeout: float = 1800.0

    @classmethod
    def of(cls, accelerator: Accelerator, output_dir: Path, keep: int | None, **flags: Any) -> "_Arguments":
        """The place of this rank is the accelerator's."""
        return cls(
            str(output_dir),
            keep,
            process_index=accelerator.process_index,
            local_process_index=accelerator.local_process_index,
            world_size=accelerator.num_processes,
            **flags,
        )

    @property
    def should_save(self) -> bool:
        return self.process_index == 0


class _Loop:
    """A loop with Accelerate, as `CheckpointWriter` sees a Trainer."""

    on_tpu = by_transformers = False

    def __init__(self, accelerator: Accelerator, args: _Arguments) -> None:
        self.accelerator, self.args = accelerator, args
        self.state = SimpleNamespace(global_step=0, best_model_checkpoint=None)
        self.stop, self.watch = Stop(), HangWatch(UNWATCHED, Path(args.output_dir))
        self.lock: Any = None
        self.is_resumed = False

    @property
    def is_sharded(self) -> bool:
        return getattr(self.accelerator.state, "fsdp_plugin", None) is not None

    def get_total_train_batch_size(self, _: Any) -> int:
        """Unknown: the loop counts its rows itself."""
        return 0

    def _get_output_dir(self, _: Any) -> str:
        return self.args.output_dir
