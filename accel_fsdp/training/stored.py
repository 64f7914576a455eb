"""Checkpoints in a store (`--checkpoint_uri`): they are uploaded while training goes on, and fetched by a resume."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.utils import gather_object

from accel_fsdp import console
from accel_fsdp.checkpoints import Damaged, Store, Unreached, completeness, file_names, marker, store
from accel_fsdp.errors import UserError
from accel_fsdp.launch_environment import LaunchEnvironment
from accel_fsdp.units import any_time, gb_or_mb
from accel_fsdp.waiting import comes_true

if TYPE_CHECKING:
    from transformers import TrainingArguments

PAUSE_SECONDS = 1.0
"""How often a thread looks for a new checkpoint, or tries an upload again."""


class Uploads:
    """Uploads the newest checkpoint, with a thread on the first rank of each machine.

    Each thread uploads the files that its machine's ranks wrote, and the first machine's the marker, once all are
    there. A store that is down delays this, and never training. The threads are daemons: a rank that fails ends without
    them, and the next run uploads what is missing. `current` is the checkpoint that is being uploaded.
    """

    def __init__(self, trainer: Any, keep: int | None) -> None:
        if trainer.args.save_on_each_node:
            raise UserError(
                "--checkpoint_uri with --save_on_each_node",
                why="only checkpoints in a folder of all ranks are uploaded",
                fix="leave out --checkpoint_uri",
            )
        self.trainer, self.args, self.keep, self.launch = trainer, trainer.args, keep, LaunchEnvironment.now()
        self.store, self.output = Store(self.args.checkpoint_uri), Path(self.args.output_dir)
        self.current = self._newest = self._put = self._stored = None  # type: Path | None
        self._is_new, self._is_over, self._trouble = False, True, "still being uploaded"

    def begin(self) -> None:
        """Begins, with the newest complete checkpoint here if the store lacks it."""
        newest = completeness.choose(self.output).newest
        self._is_new = newest is None
        if newest is not None:
            self.offer(newest)
        if self.args.local_process_index == 0 and self._is_over:
            self._is_over = False
            threading.Thread(target=self._work, daemon=True).start()

    def offer(self, checkpoint: Path) -> None:
        """Uploads a checkpoint, unless a newer one comes before its turn."""
        if self.args.local_process_index == 0:
            self._newest = Path(checkpoint)  # a new object, also for a step that is saved again

    def finish(self) -> str:
        """Waits until the newest checkpoint is in the store, but not for ever; returns what is left of it and why."""
        is_first = self.launch.machine_rank == 0
        if self._newest is not self._stored and is_first:
            console.say(f"waiting for uploads, {self.args.upload_timeout:g} s at most", style="cyan")
        is_done = comes_true(lambda: self._newest is self._stored, self.args.upload_timeout)
        self._is_over = True
        if self._newest is not None and not is_done:
            return f"{self._newest.name}: {self._trouble}"
        if self._newest is not None and is_first:  # what had to stay until it was there
            completeness.retire(self.output, self.keep, self.trainer.state.best_model_checkpoint)
        return ""

    def _work(self) -> None:
        while not self._is_over:
            checkpoint = self.current = None if self._newest is self._stored else self._newest
            try:
                if checkpoint is not None:
                    self._upload(checkpoint)
            except Exception as error:  # each store has its own library, with its own classes
                earlier, self._trouble = self._trouble, store.reason(error)
                if checkpoint and self._trouble != earlier and not isinstance(error, BlockingIOError):
                    what = f"{checkpoint.name} can't be uploaded to {self.store.uri}: {self._trouble}"
                    console.say(f"{what}; training continues, and so do the tries", style="yellow")
            time.sleep(PAUSE_SECONDS)

    def _upload(self, checkpoint: Path) -> None:
        """Uploads the files of this machine, until a newer checkpoint comes, and then the marker."""
        began, machine, listed = time.monotonic(), self.launch.machine_rank, marker.sizes_of(checkpoint)
        if self.store.marker_of(checkpoint.name) != marker.content_of(checkpoint):
            if self._put is not checkpoint:
                self._begin(checkpoint)
                ranks = range(self.args.process_index, self.args.process_index + self.launch.local_world_size)
                for name in (name for rank in ranks for name in marker.of_rank(listed, rank, self.args.world_size)):
                    if self._newest is not checkpoint:
                        return
                    self.store.put(checkpoint, name)
                self._put = checkpoint
            self.store.seal(checkpoint, machine, self.launch.machines)
            if machine == 0:
                took = f"{gb_or_mb(sum(listed.values()))} in {any_time(time.monotonic() - began)}"
                console.say(f"{checkpoint.name} is at {self.store.uri}: {took}", style="cyan")
        if machine == 0:
            self.store.retire(self.keep, self.trainer.state.best_model_checkpoint)
        self._stored = checkpoint

    def _begin(self, checkpoint: Path) -> None:
        """Marks a checkpoint as unfinished in the store; the first machine describes the model."""
        if self._is_new and (other := self.store.newest()):
            raise OSError(f"it holds {other} of another run")
        self._is_new = False
        self.store.unseal(checkpoint.name)
        described = self.output / file_names.DESCRIBED
        for name in marker.sizes_of(described) if self.launch.machine_rank == 0 else ():
            self.store.put(described, name)


def check_unused(training: "TrainingArguments") -> None:
    """Raises a UserError, on all ranks, if the store of a new run holds a run. An unreachable store raises nothing."""

    def check(store: Store) -> None:
        if store.checkpoints():
            raise UserError(
                f"{store.uri} already holds a run",
                why="its checkpoints and this run's would be mixed up",
                fix="--resume_from_checkpoint true to go on with it, or another --checkpoint_uri",
            )

    _on_first(training, check, "training continues, and checkpoints are uploaded once it answers")


def fetch_newer(training: "TrainingArguments") -> None:
    """Fetches the store's newest complete checkpoint if it is newer than those here.

    One whose bytes have changed is marked as unfinished there, and the one before it is taken.

    Raises:
        UserError: nothing is here and the store can't be reached, or the disk is full. Nothing is left of it then.
    """
    output = Path(training.output_dir)
    here = completeness.choose(output).newest

    def fetch(store: Store) -> None:
        while file_names.step(name := store.newest()) > file_names.step(here.name if here else ""):
            try:
                return store.get(name, output)
            except Damaged as damaged:
                console.say(f"skipped: {damaged.what}", style="yellow")
                store.unseal(name)

    _on_first(training, fetch, f"a newer checkpoint than {here} can't be looked for" if here else "")


def _on_first(training: "TrainingArguments", action: Callable[[Store], None], when_down: str) -> None:
    """Calls `action` on the first rank; if it fails, all raise its error, so that no rank waits for it.

    `when_down` says what happens if the store can't be reached; empty if that is an error.
    """
    if not training.checkpoint_uri:
        return
    failed: list[UserError] = []
    if training.process_index == 0:
        try:
            with (place := Store(training.checkpoint_uri)).reached():
                action(place)
        except UserError as error:
            if when_down and isinstance(error, Unreached):
                console.say(f"{error.what}; {when_down}", style="yellow")
            else:
                failed = [error]
    for of_first in gather_object(failed):
        raise of_first
