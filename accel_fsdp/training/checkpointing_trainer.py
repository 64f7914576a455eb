"""A Trainer whose checkpoints survive: whole or not at all, resumed with every part, saved when it is told to stop."""

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from accelerate.utils import gather_object
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from accel_fsdp import atomic_files, console, disks
from accel_fsdp.checkpoints import Origin, completeness, file_names
from accel_fsdp.config import ANY_FSDP, Engine, zero_name
from accel_fsdp.errors import Stopped, UserError
from accel_fsdp.library_internals import TRAINER, Internal
from accel_fsdp.models import counting, state_bytes
from accel_fsdp.prediction import cost
from accel_fsdp.training import resuming
from accel_fsdp.training.hang_watch import HangWatch
from accel_fsdp.training.preemption import Stop
from accel_fsdp.training.reporting import History
from accel_fsdp.training.resuming_trainer import ResumingTrainer, cause
from accel_fsdp.units import gib_or_mib

RELIES_ON = (
    Internal(f"{TRAINER}.train", "self resume_from_checkpoint *"),
    Internal(f"{TRAINER}._run_epoch"),
    Internal(f"{TRAINER}._finalize_training", "self *"),
    Internal(f"{TRAINER}._get_output_dir", "self trial"),
    Internal(f"{TRAINER}._save_checkpoint", "self model trial"),
    Internal(f"{TRAINER}._init_training_state", "self max_steps *"),
)
SHOWN_SECONDS = 30
"""How long NFS may take to show another machine's new names, by its default acdirmin."""
WRITE_ERRORS = (OSError, RuntimeError, CheckpointException, SafetensorError)
GROUPING = ("group_by_length", "batch_rebalance")


class SurvivingTrainer(ResumingTrainer):
    """`Trainer` that loses nothing but the steps since its last complete checkpoint."""

    def __init__(self, *args: Any, history: History | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.history = history or History({})
        self.stop = Stop()
        self.add_callback(self.stop)
        self.watch = HangWatch(
            getattr(self.args, "hang_timeout", None), Path(self.args.output_dir), self.args.ddp_timeout
        )
        self.add_callback(self.watch)
        self.checkpoint_bytes, self.export_bytes = self._predicted_bytes()

    def _origin(self) -> Origin:
        args = self.args
        zero = getattr(self.accelerator.state, "deepspeed_plugin", None)
        engine = zero_name(zero.zero_stage) if zero is not None else Engine.DDP.label
        engine = ANY_FSDP if self.is_fsdp_enabled else engine
        rows = self.get_total_train_batch_size(args)
        return Origin(engine, args.world_size, rows, self.history.settings, self.history.before)

    # Training, and how it ends

    def train(self, resume_from_checkpoint: str | None = None, **kwargs: Any) -> Any:
        """Trains, from the checkpoint where one is given.

        Raises:
            UserError: the checkpoint can't be resumed as this run is set up, the disk is too small, or a rank is gone.
            Stopped: SIGTERM, SIGUSR1 or Ctrl-C came, and there is a checkpoint to go on from.
        """
        if resume_from_checkpoint is not None and not self._on_tpu:  # its files are others again
            grouping = str(self.args.train_sampling_strategy) in GROUPING
            resuming.check(Path(resume_from_checkpoint), self._origin(), grouping, not self.args.ignore_data_skip)
        self.watch.begin()
        try:
            self._check_shared_disk(resume_from_checkpoint)
            with self._explaining():
                result = super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)
            self.watch.trained()
            return result
        except Stopped:
            self.stop.ignore()
            self.watch.end()
            raise
        except BaseException as error:
            if self.args.local_process_index != 0:
                self.stop.give_in()
            if isinstance(error, (RuntimeError, CheckpointException)) and _is_lost(error):
                self._blame(error)
            self.watch.tell(error)
            raise
        finally:
            self.stop.release()

    def _explaining(self) -> contextlib.AbstractContextManager[None]:
        """Around training: subclasses may raise an error that says more.

        The other ranks hear of it afterwards, because they wait only seconds for a rank that has failed to end.
        """
        return contextlib.nullcontext()

    def _blame(self, error: BaseException) -> NoReturn:
        """Says who is gone, as far as signs of life tell; local rank 0 shows the stack of one that failed.

        Raises:
            UserError: always.
        """
        who, stack = self.watch.culprit()
        if stack and self.args.local_process_index == 0:
            console.say(f"{who}\n{stack.rstrip()}", lines=True)
        self._refuse(f"a collective failed: {who or cause(error)}", error)

    def _run_epoch(self, **kwargs: Any) -> None:
        """Trainer takes one step too many when it resumes a run whose steps were all done (transformers 5.23)."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(**kwargs)

    def _finalize_training(self, *args: Any) -> Any:
        if self.stop.agreed:
            raise Stopped(
                f"{self.stop.agreed} after step {self.state.global_step}",
                why=f"saved: {self._folder()}",
                fix="the same command with --resume_from_checkpoint true",
            )
        with self._own_retention(), self.watch.doing("the end"):
            return super()._finalize_training(*args)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluates as `Trainer` does."""
        with self.watch.doing("an evaluation"):
            found: dict[str, float] = super().evaluate(*args, **kwargs)
            return found

    # Saving

    def _folder(self, trial: Any = None) -> Path:
        return Path(self._get_output_dir(trial)) / f"{file_names.CHECKPOINT}{self.state.global_step}"

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """A checkpoint that counts only once every file of every rank is on disk."""
        folder = self._folder(trial)
        with self.watch.doing("a save"):
            self._together(lambda: self._begin(folder))
            with self._abandoned_on_errors(folder), self._own_retention():
                super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            hashes = self._hashes(folder)
            self._together(lambda: self._seal(folder, hashes))

    @contextlib.contextmanager
    def _abandoned_on_errors(self, folder: Path) -> Iterator[None]:
        """Leaves no half-written checkpoint where the block fails to write it, and the complete one that it replaces.

        Raises:
            UserError: the disk is full, or what else kept a library from writing.
        """
        try:
            yield
        except (Exception, CheckpointException) as error:  # which is a BaseException
            full = "" if (lost := _is_lost(error)) else disks.full(error, folder)
            if lost or not (full or isinstance(error, (*WRITE_ERRORS, UserError))):
                raise
            if self.args.should_save:
                completeness.abandon(folder)
            if isinstance(error, UserError) and not full:
                raise
            self._refuse(f"cannot save {folder}: {full or cause(error)}", error, "free some space" if full else "")

    def _begin(self, folder: Path) -> None:
        with self._abandoned_on_errors(folder):
            completeness.begin(folder)
        newest = completeness.choose(folder.parent).newest
        needed = completeness.size_bytes(newest) if newest else self.checkpoint_bytes
        try:
            self._check_room(needed, f"{folder.name} takes {gib_or_mib(needed)}")
        except UserError:
            completeness.abandon(folder)
            raise

    def _hashes(self, folder: Path) -> dict[str, str] | None:
        """Of all files, each taken by the rank that wrote it; None where a rank has files that no other one sees."""
        if self._on_tpu or self.args.save_on_each_node:
            return None
        failed: Exception | None = None
        try:
            found = completeness.own_hashes(folder, self.args.process_index, self.args.world_size)
        except (OSError, UserError) as error:
            found, failed = {}, error
        parts: list[tuple[dict[str, str], str]] = gather_object([(found, cause(failed) if failed else "")])
        if why := next(filter(None, (why for _, why in parts)), ""):
            if self.args.should_save:
                completeness.abandon(folder)
            self._refuse(f"cannot save {folder}: {why}", failed or OSError(why))
        return {name: one for part, _ in parts for name, one in part.items()}

    def _seal(self, folder: Path, hashes: dict[str, str] | None) -> None:
        with self._abandoned_on_errors(folder):
            completeness.seal(folder, self._origin(), hashes)
        completeness.retire(folder.parent, self.args.save_total_limit, self.state.best_model_checkpoint)

    @contextlib.contextmanager
    def _own_retention(self) -> Iterator[None]:
        """Trainer counts half-written checkpoints as any other, and at the end deletes the last one for the best."""
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            yield
        finally:
            self.args.save_total_limit = limit

    def _together(self, act: Callable[[], None]) -> None:
        """Acts on the ranks that write; what one raises all raise, so that none waits for one that has left."""
        failed: list[tuple[str, str, str]] = []
        if self.args.should_save:
            try:
                act()
            except UserError as error:
                failed = [(error.what, error.why, error.fix)]
        everywhere = failed if self._on_tpu else gather_object(failed)
        if everywhere:
            what, why, fix = everywhere[0]
            raise UserError(what, why=why, fix=fix)

    def _refuse(self, what: str, error: BaseException, first: str = "") -> NoReturn:
        newest = completeness.choose(Path(self.args.output_dir)).newest
        raise UserError(
            what,
            why=f"training stops; {newest} is the newest complete checkpoint" if newest else "training stops",
            fix=f"{first or 'fix the cause'}, then {'--resume_from_checkpoint true' if newest else 'start again'}",
        ) from error

    # Disk

    def _init_training_state(self, max_steps: int, *args: Any) -> Any:
        found = super()._init_training_state(max_steps, *args)
        self._together(self._check_whole_run)
        return found

    def _check_shared_disk(self, resume_from: str | None) -> None:
        """Shards lie together only where all ranks write to one folder; and all must go on from the same step.

        Raises:
            UserError: a rank of another machine sees another disk. On all ranks.
        """
        if self._on_tpu or not (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            return
        folder = Path(self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".shared-", dir=folder, ignore_cleanup_errors=True) as probe:
            [first, *_] = gather_object([Path(probe).name])
            seen = gather_object([(_appears(folder / first), resume_from)])
            self.accelerator.wait_for_everyone()
        if all(there for there, _ in seen) and len({start for _, start in seen}) == 1:
            return
        raise UserError(
            f"{self.args.output_dir} is not the same folder on all machines",
            why="each would keep its own ranks' part of every checkpoint, and none would be complete",
            fix="--output_dir on a disk that all of them share",
        )

    def _check_whole_run(self) -> None:
        count = self._checkpoints_to_come()
        text = f"{count} checkpoints of about {gib_or_mib(self.checkpoint_bytes)} and the export take"
        needed = count * self.checkpoint_bytes + self.export_bytes
        self._check_room(needed, f"{text} {gib_or_mib(needed)}")

    def _check_room(self, needed_bytes: int, text: str) -> None:
        output = atomic_files.existing_part(Path(self.args.output_dir))
        free = shutil.disk_usage(output).free
        if needed_bytes > free:
            raise UserError(
                f"{text}, {gib_or_mib(free)} are free at {output}",
                why="the run would end at a full disk",
                fix="free some space, a lower --save_total_limit, fewer saves (--save_steps), or another --output_dir",
            )

    def _checkpoints_to_come(self) -> int:
        """How many more checkpoints will lie on the disk at once than do now."""
        left, epochs = self.state.max_steps - self.state.global_step, self.state.num_train_epochs
        per_epoch = self.state.max_steps / epochs if epochs <= self.state.max_steps else left  # unknown of a stream
        saves = cost.events(str(self.args.save_strategy.value), self.state.save_steps, left, per_epoch)  # type: ignore[arg-type]
        there = sum(not completeness.flaw(path) for path in file_names.checkpoints(Path(self.args.output_dir)))
        return cost.at_once(saves, self.args.save_total_limit or 0, there)

    def _predicted_bytes(self) -> tuple[int, int]:
        """Of a checkpoint and of the export, from the model before it is sharded.

        Mixed precision under FSDP and ZeRO has float32 masters of what is trained. FULL_STATE_DICT stores the weights
        a second time for Hugging Face. An adapter goes without its base.
        """
        mixed, fsdp, zero = self.accelerator.mixed_precision != "no", self.is_fsdp_enabled, self.is_deepspeed_enabled
        trained = {
            p: state_bytes.weight_bytes(p.element_size(), mixed, fsdp, zero)
            for p in self.model.parameters()
            if p.requires_grad
        }
        masters = sum(counting.numel(p) * each for p, each in trained.items())
        optimizer = self._optimizer_bytes(trained)
        adapter = hasattr(self.model, "peft_config")
        held = (counting.numel(p) * p.element_size() for p in self.model.parameters() if not p.requires_grad)
        weights = masters + (0 if adapter else sum(held))
        if zero:
            stored = trained if adapter else self.model.parameters()
            forward = sum(counting.numel(p) * (state_bytes.LOW if mixed else p.element_size()) for p in stored)
            stage = int(self.accelerator.state.deepspeed_plugin.zero_stage)
            return state_bytes.checkpoint_bytes(masters, optimizer, zero_stage=stage, forward=forward), weights
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        full = plugin is not None and "FULL" in str(plugin.state_dict_type)
        return state_bytes.checkpoint_bytes(weights, optimizer, gathered=full), weights

    def _optimizer_bytes(self, trained: Mapping[torch.nn.Parameter, int]) -> int:
        """Of the state of parameters with the bytes of an element; ZeRO's partitions are no embedding's any more."""
        optim = str(self.args.optim.value)
        tables = set() if self.is_deepspeed_enabled else counting.embeddings(self.model)
        shapes = {p: counting.shape(p) for p in trained}
        return sum(state_bytes.optimizer_bytes(optim, shapes[p], each, p in tables) for p, each in trained.items())


def _appears(folder: Path) -> bool:
    """Whether this rank sees what rank 0 made; network disks may take a while to show it."""
    until = time.monotonic() + SHOWN_SECONDS
    while folder.name not in os.listdir(folder.parent):
        if time.monotonic() > until:
            return False
        time.sleep(0.2)
    return True


def _is_lost(error: BaseException) -> bool:
    """Whether a collective failed for want of a rank: NCCL and the store have their own error, gloo a RuntimeError."""
    return isinstance(error, torch.distributed.DistError) or "gloo" in str(error)
