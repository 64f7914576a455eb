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
    them, and the next run uploads what is missing.
    """

    def __init__(self, training: Any, keep: int | None) -> None:
        launch, first = LaunchEnvironment.now(), training.process_index
        self.store, self.output, self.keep = Store(training.checkpoint_uri), Path(training.output_dir), keep
        self.machine, self.machines = launch.machine_rank, launch.machines
        self.timeout_seconds = training.upload_timeout
        self._ranks, self._of = range(first, first + launch.local_world_size), training.world_size
        self._is_leader, self._is_new = training.local_process_index == 0, False
        self.current = self._newest = self._stored = self._best = self._trouble = ""
        self._content, self._began, self._uploaded = None, 0.0, set()  # type: bytes | None, float, set[str]
        self._thread, self._is_over = threading.Thread(), False
        if training.save_on_each_node:
            raise UserError(
                "--checkpoint_uri with --save_on_each_node",
                why="only checkpoints in a folder of all ranks are uploaded",
                fix="leave out --checkpoint_uri",
            )

    def begin(self) -> None:
        """Begins, with the newest complete checkpoint here if the store lacks it."""
        newest = completeness.choose(self.output).newest
        self._is_new, self._is_over = newest is None, False
        if newest is not None:
            self.offer(newest, None)
        if self._is_leader and not self._thread.is_alive():
            self._thread = threading.Thread(target=self._work, daemon=True)
            self._thread.start()

    def offer(self, checkpoint: Path, best: str | None) -> None:
        """Uploads a checkpoint, unless a newer one comes before its turn."""
        if self._is_leader:
            self._newest, self._best, self._stored = checkpoint.name, best or "", ""

    def finish(self) -> str:
        """Waits until the newest checkpoint is in the store, but not for ever; returns what is left of it and why."""
        if self._newest != self._stored and self.machine == 0:
            console.say(f"waiting for uploads, {self.timeout_seconds:g} s at most", style="cyan")
        is_done = comes_true(lambda: self._newest == self._stored, self.timeout_seconds)
        self._is_over = True
        if not is_done:
            return f"{self._newest}: {self._trouble or 'still being uploaded'}"
        if self._newest and self.machine == 0:
            completeness.retire(self.output, self.keep, self._best)  # what had to stay until it was there
        return ""

    def _work(self) -> None:
        while not self._is_over:
            self.current = self._newest if self._newest != self._stored else ""
            try:
                if self.current:
                    self._upload(self.output / self.current)
            except Exception as error:  # each store has its own library, with its own classes
                earlier, self._trouble = self._trouble, store.reason(error)
                if self._trouble != earlier and not isinstance(error, BlockingIOError):
                    what = f"{self.current} can't be uploaded to {self.store.uri}: {self._trouble}"
                    console.say(f"{what}; training continues, and so do the tries", style="yellow")
            time.sleep(PAUSE_SECONDS)

    def _upload(self, checkpoint: Path) -> None:
        """Uploads the files of this machine, but those that an earlier try has uploaded, until a newer one comes."""
        content, listed = marker.content_of(checkpoint), marker.sizes_of(checkpoint)
        if self.store.marker_of(checkpoint.name) != content:
            if self._content != content:
                self._begin(checkpoint)
                self._content, self._began, self._uploaded = content, time.monotonic(), set()
            for name in (name for rank in self._ranks for name in marker.of_rank(listed, rank, self._of)):
                if self._newest != checkpoint.name:
                    return
                if name not in self._uploaded:
                    self.store.put(checkpoint, name)
                    self._uploaded.add(name)
            self.store.seal(checkpoint, self.machine, self.machines)
            if self.machine == 0:
                took = f"{gb_or_mb(completeness.size_bytes(checkpoint))} in {any_time(time.monotonic() - self._began)}"
                console.say(f"{checkpoint.name} is at {self.store.uri}: {took}", style="cyan")
        if self.machine == 0:
            self.store.retire(self.keep, self._best)
        self._stored = checkpoint.name

    def _begin(self, checkpoint: Path) -> None:
        """Marks a checkpoint as unfinished in the store; the first machine describes the model."""
        if self._is_new and (other := self.store.newest()):
            raise OSError(f"it holds {other} of another run")
        self._is_new = False
        self.store.unseal(checkpoint.name)
        if self.machine == 0:
            self.store.describe(self.output)


def check_unused(training: "TrainingArguments") -> None:
    """Raises a UserError, on all ranks, if the store of a new run holds a run. A store that is down holds up none."""

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
    here = completeness.choose(Path(training.output_dir)).newest

    def fetch(store: Store) -> None:
        name = store.newest()
        if not name or (here and file_names.step(name) <= file_names.step(here.name)):
            return
        console.say(f"fetching {name} from {store.uri}", style="cyan")
        try:
            store.get(name, Path(training.output_dir))
        except Damaged as damaged:
            console.say(f"skipped: {damaged.what}", style="yellow")
            store.unseal(name)
            fetch(store)

    _on_first(training, fetch, f"a newer checkpoint than {here} can't be looked for" if here else "")


def _on_first(training: "TrainingArguments", action: Callable[[Store], None], when_down: str) -> None:
    """Calls `action` on the first rank; if it fails, all raise its error, so that no rank waits for it.

    `when_down` says what happens if the store can't be reached; empty if that is an error.
    """
    if not training.checkpoint_uri:
        return
    failed: list[UserError] = []
    if training.process_index == 0:
        place = Store(training.checkpoint_uri)
        try:
            with place.reached():
                action(place)
        except UserError as error:
            failed = [] if isinstance(error, Unreached) and when_down else [error]
            if not failed:
                console.say(f"{error.what}; {when_down}", style="yellow")
    for of_first in gather_object(failed):
        raise of_first
