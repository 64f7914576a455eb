"""Uploads complete checkpoints to a store while training goes on (`--checkpoint_uri`)."""

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from accel_fsdp import console
from accel_fsdp.checkpoints import Store, completeness, marker, store
from accel_fsdp.errors import UserError
from accel_fsdp.launch_environment import LaunchEnvironment
from accel_fsdp.units import any_time, gb_or_mb

NOTICED_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 60.0
"""Between two tries; the first comes after a second, and each pause is twice as long as the one before it."""


class Uploads:
    """Uploads one checkpoint at a time, with a thread on the first rank of each machine; the newest is the next.

    Each thread uploads the files that its machine's ranks wrote. The store's objects say which machines are done, and
    the first one uploads the marker last. A store that is down delays this, and never training. The threads are
    daemons: a rank that fails ends without them, and the next run uploads what is missing.
    """

    def __init__(self, training: Any, keep: int | None) -> None:
        launch = LaunchEnvironment.now()
        self.store, self.output, self.keep = Store(training.checkpoint_uri), Path(training.output_dir), keep
        self.machine, self.machines = launch.machine_rank, launch.machines
        self.timeout_seconds, first = training.upload_timeout, training.process_index
        self._ranks, self._of = range(first, first + launch.local_world_size), training.world_size
        self._is_leader = training.local_process_index == 0
        self.current, self._waiting, self._best, self._trouble = "", "", "", ""
        self._is_new = False
        self._closing, self._over, self._changed = False, threading.Event(), threading.Condition()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Begins, with the newest complete checkpoint here if the store lacks it."""
        if self._is_leader and self._thread is None:
            newest = completeness.choose(self.output).newest
            self._waiting, self._is_new = newest.name if newest else "", newest is None
            self._closing, self._thread = False, threading.Thread(target=self._run, daemon=True)
            self._over.clear()
            self._thread.start()

    def offer(self, checkpoint: Path, best: str | None) -> None:
        """Uploads a checkpoint as soon as the one before it is there."""
        with self._changed:
            self._waiting, self._best = checkpoint.name, best or ""
            self._changed.notify()

    def finish(self) -> str:
        """Waits until the newest checkpoint is in the store, but not for ever; returns what is left of it and why."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        thread, self._thread = self._thread, None
        if thread is None:
            return ""
        thread.join(NOTICED_SECONDS)
        if thread.is_alive() and self.machine == 0:
            console.say(f"waiting for uploads, {self.timeout_seconds:g} s at most", style="cyan")
        thread.join(max(self.timeout_seconds - NOTICED_SECONDS, 0))
        self._over.set()
        left = self._waiting or self.current
        if not left and self.machine == 0:
            completeness.retire(self.output, self.keep, self._best)  # what had to stay until it was there
        return f"{left}: {self._trouble or 'still being uploaded'}" if left else ""

    def _run(self) -> None:
        while not self._over.is_set():
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                self.current, self._waiting = self._waiting, ""
            if not self.current:
                return
            if self._bring(self.output / self.current):
                self.current = ""

    def _bring(self, checkpoint: Path) -> bool:
        """Uploads this machine's files; false if time is over before all of them are there."""
        began, is_first, is_there = time.monotonic(), self.machine == 0, list[bool]()

        def begin() -> None:
            if self._is_new and (other := self.store.newest()[0]):
                raise OSError(f"it holds {other} of another run")
            self._is_new = False
            is_there.append(self.store.begin(checkpoint, self.machine))

        if not self._retried(begin) or is_there[0]:
            return not self._over.is_set()
        listed = marker.listed(checkpoint)
        names = [name for rank in self._ranks for name in marker.of_rank(listed, rank, self._of)]
        steps: list[Callable[[], None]] = [partial(self.store.upload, checkpoint, [name]) for name in names]
        steps.append(partial(self.store.finish, checkpoint, self.machine, self.machines))
        if is_first:
            steps = [partial(self.store.describe, self.output), *steps]
            steps.append(lambda: self.store.retire(self.keep, self._best))
        if all(map(self._retried, steps)) and is_first:
            took = f"{gb_or_mb(sum(listed.values()))} in {any_time(time.monotonic() - began)}"
            console.say(f"{checkpoint.name} is at {self.store.uri}: {took}", style="cyan")
        return not self._over.is_set()

    def _retried(self, action: Callable[[], None]) -> bool:
        """Calls `action` until it succeeds; false if the checkpoint is gone, a newer one waits, or time is over."""
        pause = 1.0
        while not self._over.is_set():
            try:
                action()
                return True
            except Exception as error:  # each store has its own library, with its own classes
                trouble, waits = store.reason(error), isinstance(error, store.Waits)
            if self._waiting or completeness.flaw(self.output / self.current):
                return False
            if trouble != self._trouble and not waits:
                what = f"{self.current} can't be uploaded to {self.store.uri}: {trouble}"
                console.say(f"{what}; training goes on, and so do the tries", style="yellow")
            self._trouble = trouble
            self._over.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        return False


def begun(trainer: Any, keep: int | None) -> Uploads | None:
    """The uploads that `--checkpoint_uri` asks for; else None.

    Raises:
        UserError: machines don't share a folder.
    """
    if trainer.args.checkpoint_uri and trainer.args.save_on_each_node:
        raise UserError(
            "--checkpoint_uri with --save_on_each_node",
            why="only checkpoints in a folder of all ranks are uploaded",
            fix="leave out --checkpoint_uri",
        )
    return Uploads(trainer.args, keep) if trainer.args.checkpoint_uri else None
