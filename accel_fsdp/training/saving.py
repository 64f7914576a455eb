"""Writes checkpoints whole or not at all. Complete is one whose marker, written last, says so."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from accelerate.utils import gather_object
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from transformers import TrainerCallback

from accel_fsdp import console, disks
from accel_fsdp.checkpoints import Origin, completeness, file_names, marker
from accel_fsdp.config import ANY_FSDP, Engine, zero_name
from accel_fsdp.errors import UserError
from accel_fsdp.ranks import stacks
from accel_fsdp.training import background_saves, disk_room
from accel_fsdp.training.loading import cause
from accel_fsdp.training.reporting import History
from accel_fsdp.training.stored import Uploads
from accel_fsdp.units import any_time

NOTICED_SECONDS = 0.1
WRITE_ERRORS = (OSError, RuntimeError, CheckpointException, SafetensorError)


class CheckpointWriter(TrainerCallback):  # type: ignore[misc]
    """The checkpoints of a run. Create it before the model is sharded; call its methods on all ranks."""

    def __init__(self, trainer: Any, history: History) -> None:
        self.trainer, self.args, self.history = trainer, trainer.args, history
        # Trainer's own deletion counts half-written checkpoints, and could delete the last complete one
        self.keep, trainer.args.save_total_limit = trainer.args.save_total_limit, None
        self.background = background_saves.requested(trainer)
        self.uploads: Uploads | None = None
        if trainer.args.checkpoint_uri:
            self.uploads = Uploads(trainer, self.keep)

    def origin(self) -> Origin:
        """The run's properties that are stored in its checkpoints."""
        zero = getattr(self.trainer.accelerator.state, "deepspeed_plugin", None)
        engine = zero_name(zero.zero_stage) if zero is not None else Engine.DDP.label
        engine = ANY_FSDP if self.trainer.is_sharded else engine
        rows = self.trainer.get_total_train_batch_size(self.args)
        return Origin(engine, self.args.world_size, rows, self.history.settings, self.history.before)

    def folder(self, trial: Any = None) -> Path:
        """The folder of a checkpoint of the current step."""
        return Path(self.trainer._get_output_dir(trial)) / f"{file_names.CHECKPOINT}{self.trainer.state.global_step}"

    def save(self, trial: Any, write: Callable[[], None]) -> None:
        """Calls `write`, Trainer's own method. In the background, a thread then writes the shards."""
        self.wait()
        began, folder, background = time.monotonic(), self.folder(trial), self.background
        self.on_writing_ranks(lambda: self._begin(folder))
        staging = contextlib.nullcontext() if background is None else background.staging()
        with self._abandon_on_errors(folder), staging:
            write()
        if background is None:
            self.trainer.accelerator.wait_for_everyone()
            self._complete(folder)
        else:
            self.log(
                f"{folder.name} is being written; training waited {any_time(time.monotonic() - began)} for its copy"
            )
            background.begin(lambda staged: self._complete_in_background(folder, staged, background.group))

    def wait(self) -> None:
        """Waits until the last checkpoint is complete."""
        if self.background is not None and (waited := self.background.wait()) > NOTICED_SECONDS:
            self.log(f"training waited {any_time(waited)} until the last checkpoint was complete")

    def upload_rest(self) -> str:
        """Waits until the newest checkpoint is in the store; returns what is left of it and why, on the first rank."""
        return self.uploads.finish() if self.uploads is not None else ""

    def require_uploaded(self) -> None:
        """Raises a UserError, on all ranks, if the newest checkpoint isn't in the store."""
        if self.uploads is None:
            return
        left, uri = self.upload_rest(), self.args.checkpoint_uri

        def check_uploaded() -> None:
            if left:
                raise UserError(
                    f"{left}, not uploaded to {uri}",
                    why=f"the run is complete; its newest checkpoint is only in {self.args.output_dir}",
                    fix="the same command with --resume_from_checkpoint true, when the bucket can be reached",
                )

        self.on_writing_ranks(check_uploaded)

    def complete_last(self) -> None:
        """Completes the checkpoint that is being written, if the other ranks still can, however training ended."""
        with contextlib.suppress(Exception, CheckpointException):
            self.wait()

    def _complete_in_background(self, folder: Path, write: Callable[[], None], group: Any) -> None:
        began = time.monotonic()
        try:
            with self._abandon_on_errors(folder):
                write()
            self._complete(folder, group)
        except UserError as error:
            self.log(f"{error.what}; training continues, and stops at its next save")
            raise
        self.log(f"{folder.name} is complete, written in {any_time(time.monotonic() - began)}")

    def _complete(self, folder: Path, group: Any = None) -> None:
        hashes = self._hashes(folder, group)
        self.on_writing_ranks(lambda: self._seal(folder, hashes), group)
        if self.uploads is not None:
            self.uploads.offer(folder)

    def log(self, line: str) -> None:
        """Prints a line, on the first rank."""
        if self.args.process_index == 0:
            console.say(line)

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Begins to upload, and raises a UserError, on all ranks, if the memory for copies is too small."""
        if self.uploads is not None:
            self.uploads.begin()
        if self.background is not None:
            disk_room.check_staging(self.trainer)

    def on_writing_ranks(self, action: Callable[[], None], group: Any = None) -> None:
        """Calls `action` on the ranks that write files.

        If one raises, all raise, so that no rank waits for one that has ended.
        """
        failed: list[tuple[str, str, str]] = []
        if self.args.should_save:
            try:
                action()
            except UserError as error:
                failed = [(error.what, error.why, error.fix)]
        if on_ranks := self._of_all_ranks(failed, group):
            what, why, fix = on_ranks[0]
            raise UserError(what, why=why, fix=fix)

    def _of_all_ranks(self, own: list[Any], group: Any) -> list[Any]:
        """The items of all ranks, by the group of the background or the job's own."""
        if group is None:
            return list(gather_object(own))
        of_ranks: list[list[Any]] = [[]] * dist.get_world_size(group)
        dist.all_gather_object(of_ranks, own, group=group)
        return [item for items in of_ranks for item in items]

    def stop_run(self, what: str, error: BaseException, fix_first: str = "") -> NoReturn:
        """Raises a UserError that names the newest complete checkpoint."""
        newest = completeness.choose(Path(self.args.output_dir)).newest
        raise UserError(
            what,
            why=f"training stops; {newest} is the newest complete checkpoint" if newest else "training stops",
            fix=f"{fix_first or 'fix the cause'}, then {'--resume_from_checkpoint true' if newest else 'start again'}",
        ) from error

    def stop_for_lost_rank(self, error: BaseException) -> NoReturn:
        """Raises a UserError for a collective that failed, because a rank or a host was lost or waited too long."""
        stacks.keep(error)
        self.complete_last()
        self.stop_run(f"a collective failed: {cause(error)}", error, "find the rank that failed first, on any machine")

    @contextlib.contextmanager
    def _abandon_on_errors(self, folder: Path) -> Iterator[None]:
        """If the block fails, removes the half-written checkpoint, and keeps the complete one that it would replace.

        Raises:
            UserError: the disk is full, or a library failed to write.
        """
        try:
            yield
        except (Exception, CheckpointException) as error:  # the latter is a BaseException
            full = "" if (lost := lost_a_rank(error)) else disks.full(error, folder)
            if lost or not (full or isinstance(error, (*WRITE_ERRORS, UserError))):
                raise
            if self.args.should_save:
                completeness.abandon(folder)
            if isinstance(error, UserError) and not full:
                raise
            self.stop_run(f"cannot save {folder}: {full or cause(error)}", error, "free some space" if full else "")

    def _begin(self, folder: Path) -> None:
        with self._abandon_on_errors(folder):
            completeness.begin(folder)
        newest = completeness.choose(folder.parent).newest
        if newest is None:
            return
        try:
            disks.check_room(
                folder.parent,
                sum(marker.sizes_of(newest).values()),  # the new one will have about the same
                f"{folder.name} takes",
                why="the run would fill the disk",
                fix="free some space, a lower --save_total_limit, fewer saves (--save_steps), or another --output_dir",
            )
        except UserError:
            completeness.abandon(folder)
            raise

    def _hashes(self, folder: Path, group: Any) -> dict[str, str] | None:
        """The hashes of all files, each taken by the rank that wrote it; None if ranks don't share the folder."""
        if self.args.save_on_each_node:
            return None
        own_hashes, failed = dict[str, str](), None
        try:
            own_hashes = marker.own_hashes(folder, self.args.process_index, self.args.world_size)
        except (OSError, UserError) as error:
            failed = error
        parts = self._of_all_ranks([(own_hashes, cause(failed) if failed else "")], group)
        if why := next(filter(None, (why for _, why in parts)), ""):
            if self.args.should_save:
                completeness.abandon(folder)
            self.stop_run(f"cannot save {folder}: {why}", failed or OSError(why))
        return {name: digest for part, _ in parts for name, digest in part.items()}

    def _seal(self, folder: Path, hashes: dict[str, str] | None) -> None:
        with self._abandon_on_errors(folder):
            completeness.seal(folder, self.origin(), hashes)
        completeness.retire(folder.parent, self.keep, self.trainer.state.best_model_checkpoint)


def lost_a_rank(error: BaseException) -> bool:
    """Whether a collective lost a rank: NCCL and the store raise their own errors, gloo a RuntimeError."""
    return isinstance(error, torch.distributed.DistError) or "gloo" in str(error)
