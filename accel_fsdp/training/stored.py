"""Checkpoints in a store (`--checkpoint_uri`): they are uploaded while training goes on, and fetched by a resume."""

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.utils import gather_object

from accel_fsdp import console
from accel_fsdp.checkpoints import Damaged, Store, completeness, file_names, marker, store
from accel_fsdp.errors import UserError
from accel_fsdp.launch_environment import LaunchEnvironment
from accel_fsdp.units import any_time, gb_or_mb

if TYPE_CHECKING:
    from transformers import TrainingArguments

NOTICED_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 60.0
"""Between two tries; the first comes after a second, and each pause is twice as long as the one before it."""


class Uploads:
    """Uploads one checkpoint at a time, with a thread on the first rank of each machine; the newest is the next.

    Each thread uploads the files that its machine's ranks wrote, and the first machine's the marker, once all are
    there. A store that is down delays this, and never training. The threads are daemons: a rank that fails ends without
    them, and the next run uploads what is missing.
    """

    def __init__(self, training: Any, keep: int | None) -> None:
        launch = LaunchEnvironment.now()
        self.store, self.output, self.keep = Store(training.checkpoint_uri), Path(training.output_dir), keep
        self.is_first, self.timeout_seconds = launch.machine_rank == 0, training.upload_timeout
        first, self._of = training.process_index, training.world_size
        self._ranks = range(first, first + launch.local_world_size)
        self._is_leader = training.local_process_index == 0
        self.current = self._newest = self._stored = self._best = self._trouble = ""
        self._is_new, self._over = False, threading.Event()
        self._thread: threading.Thread | None = None

        if training.save_on_each_node:
            raise UserError(
                "--checkpoint_uri with --save_on_each_node",
                why="only checkpoints in a folder of all ranks are uploaded",
                fix="leave out --checkpoint_uri",
            )

    def begin(self) -> None:
        """Begins, with the newest complete checkpoint here if the store lacks it."""
        newest = completeness.choose(self.output).newest
        self._is_new = newest is None
        self._over.clear()
        if newest is not None:
            self.offer(newest, None)

    def offer(self, checkpoint: Path, best: str | None) -> None:
        """Uploads a checkpoint as soon as the one before it is there."""
        if self._is_leader:
            self._newest, self._best = checkpoint.name, best or ""
            self._thread = threading.Thread(target=self._bring, args=(checkpoint, self._thread), daemon=True)
            self._thread.start()

    def finish(self) -> str:
        """Waits until the newest checkpoint is in the store, but not for ever; returns what is left of it and why."""
        if self._thread is None:
            return ""
        self._thread.join(NOTICED_SECONDS)
        if self._thread.is_alive() and self.is_first:
            console.say(f"waiting for uploads, {self.timeout_seconds:g} s at most", style="cyan")
        self._thread.join(max(self.timeout_seconds - NOTICED_SECONDS, 0))
        self._over.set()
        if self._newest != self._stored:
            return f"{self._newest}: {self._trouble or 'still being uploaded'}"
        if self.is_first:
            completeness.retire(self.output, self.keep, self._best)  # what had to stay until it was there
        return ""

    def _bring(self, checkpoint: Path, earlier: threading.Thread | None) -> None:
        """Takes one step after the other, again after errors, until a newer checkpoint comes or time is over."""
        if earlier is not None:
            earlier.join()
        self.current, began, pause, steps = checkpoint.name, time.monotonic(), 1.0, self._steps(checkpoint)
        while steps and self._newest == checkpoint.name and not self._over.is_set():
            try:
                steps[0]()
                steps[:1], pause = [], 1.0
            except Exception as error:  # each store has its own library, with its own classes
                if completeness.flaw(checkpoint):
                    break
                self._report(checkpoint, error)
                self._over.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        if not steps:
            self._stored = checkpoint.name
            if self.is_first:
                took = f"{gb_or_mb(completeness.size_bytes(checkpoint))} in {any_time(time.monotonic() - began)}"
                console.say(f"{checkpoint.name} is at {self.store.uri}: {took}", style="cyan")
        self.current = ""

    def _steps(self, checkpoint: Path) -> list[Callable[[], Any]]:
        """The files of this machine; on the first one also the model's description before, and the marker last."""
        listed = marker.listed(checkpoint)
        names = [name for rank in self._ranks for name in marker.of_rank(listed, rank, self._of)]
        steps: list[Callable[[], Any]] = [partial(self.store.put, checkpoint, name) for name in names]
        if self.is_first:
            steps = [partial(self.store.describe, self.output), *steps, partial(self.store.seal, checkpoint)]
            steps.append(lambda: self.store.retire(self.keep, self._best))
        steps.insert(0, lambda: self._begin(checkpoint, steps))
        return steps

    def _begin(self, checkpoint: Path, steps: list[Callable[[], Any]]) -> None:
        if self._is_new and (other := self.store.newest()[0]):
            raise OSError(f"it holds {other} of another run")
        self._is_new = False
        if not self.store.begin(checkpoint, self.is_first):
            steps.clear()

    def _report(self, checkpoint: Path, error: Exception) -> None:
        trouble = store.reason(error)
        if trouble != self._trouble and not isinstance(error, BlockingIOError):
            what = f"{checkpoint.name} can't be uploaded to {self.store.uri}: {trouble}"
            console.say(f"{what}; training goes on, and so do the tries", style="yellow")
        self._trouble = trouble


def check_unused(training: "TrainingArguments") -> None:
    """Raises a UserError, on all ranks, if the store of a new run holds a run. A store that is down holds up none."""

    def check(store: Store) -> None:
        try:
            with store.reached():
                names = store.checkpoints()
        except UserError as error:
            console.say(f"{error.what}; training goes on, and checkpoints are uploaded once it answers", style="yellow")
            return
        if names:
            raise UserError(
                f"{store.uri} already holds a run",
                why="its checkpoints and this run's would be mixed up",
                fix="--resume_from_checkpoint true to go on with it, or another --checkpoint_uri",
            )

    _on_first(training, check)


def fetch_newer(training: "TrainingArguments") -> None:
    """Fetches the store's newest complete checkpoint if it is newer than those here.

    One whose bytes have changed is marked as unfinished there, and the one before it is taken.

    Raises:
        UserError: nothing is here and the store can't be reached, or the disk is full. Nothing is left of it then.
    """

    def fetch(store: Store) -> None:
        here = completeness.choose(Path(training.output_dir)).newest
        try:
            with store.reached():
                name = store.newest()[0]
        except UserError as error:
            if here is None:
                raise
            console.say(f"{error.what}; a newer checkpoint than {here} can't be looked for", style="yellow")
            return
        if file_names.step(name) <= (file_names.step(here.name) if here else -1):
            return
        console.say(f"fetching {name} from {store.uri}", style="cyan")
        with store.reached():
            try:
                store.get(name, Path(training.output_dir))
            except Damaged as damaged:
                console.say(f"skipped: {damaged.what}", style="yellow")
                store.unseal(name)
                fetch(store)

    _on_first(training, fetch)


def _on_first(training: "TrainingArguments", action: Callable[[Store], None]) -> None:
    """Calls `action` on the first rank; if it fails, all raise its error, so that no rank waits for it."""
    if not training.checkpoint_uri:
        return
    failed: list[UserError] = []
    if training.process_index == 0:
        try:
            action(Store(training.checkpoint_uri))
        except UserError as error:
            failed = [error]
        except OSError as error:
            what = f"cannot fetch a checkpoint: {error.strerror or error}"
            failed = [UserError(what, why="there is nothing to resume", fix="free space")]
    for of_first in gather_object(failed):
        raise of_first
