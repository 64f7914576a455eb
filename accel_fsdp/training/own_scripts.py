"""`accel_fsdp.Checkpoints`: those of `train/sft.py`, for any script with Trainer."""

import sys
import weakref
from pathlib import Path
from typing import Any

from transformers import Trainer

from accel_fsdp import atomic_files, console, library_internals
from accel_fsdp.checkpoints import file_names
from accel_fsdp.errors import Stopped
from accel_fsdp.exporter import companion_files
from accel_fsdp.training import background_saves, loading, mesh_checkpoints, preemption, resuming, safe_checkpoints
from accel_fsdp.training.preemption import Stop
from accel_fsdp.training.reporting import History
from accel_fsdp.training.safe_checkpoints import SafeCheckpoints
from accel_fsdp.training.saving import CheckpointWriter


class Checkpoints:
    """Checkpoints that are whole or don't exist, resumed on any number of ranks, and saved when a job is preempted.

    This is all:

        accel_fsdp.Checkpoints(trainer, async_checkpoints=True, checkpoint_uri="s3://bucket/run")
        trainer.train(resume_from_checkpoint="auto")

    Create it after Trainer, on all ranks. SIGTERM, SIGUSR1 and Ctrl-C save a checkpoint, and end the script with
    code 75.
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        async_checkpoints: bool = False,
        checkpoint_uri: str | None = None,
        upload_timeout: float = 600.0,
    ) -> None:
        """Gives the trainer, whatever its class is, the methods of `SafeCheckpoints`.

        Raises:
            UserError: an argument can't be used.
        """
        modules = (safe_checkpoints, background_saves, loading, mesh_checkpoints, preemption)
        used = (internal for module in modules for internal in module.RELIES_ON)
        library_internals.check(*used, why="checkpoints depend on it")
        run: Any = trainer
        run.args.async_checkpoints, run.args.checkpoint_uri = async_checkpoints, checkpoint_uri
        run.args.upload_timeout = upload_timeout
        if not isinstance(run, _OwnTrainer):
            run.__class__ = type(type(run).__name__, (_OwnTrainer, type(run)), {})
        output = Path(run.args.output_dir)
        run.stop = Stop()
        run.checkpoints = CheckpointWriter(weakref.proxy(run), History({}))
        run.add_callback(run.stop)
        run.add_callback(run.checkpoints)
        if run.args.process_index == 0:
            companion_files.describe(run.model, run.processing_class, output / file_names.DESCRIBED)


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
            self.stop.leave_ignored()
            if self.args.process_index == 0:
                again = Stopped(stopped.what, why=stopped.why, fix="the same command again, which resumes")
                console.say(str(again), lines=True)
            sys.exit(Stopped.exit_code)
        finally:
            self.checkpoints.complete_last()
            self.stop.release()
            if self.lock is not None:
                self.lock.release()
