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

    @property
    def left(self) -> str:
        """The newest checkpoint if it isn't in the store; else an empty text."""
        return "" if self._newest == self._stored else self._newest

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
        if not self.left and self.is_first:
            completeness.retire(self.output, self.keep, self._best)  # what had to stay until it was there
        return f"{self.left}: {self._trouble or 'still being uploaded'}" if self.left else ""

    def _bring(self, checkpoint: Path, earlier: threading.Thread | None) -> None:
        if earlier is not None:
            earlier.join()
        if self._newest == checkpoint.name:
            self.current, began = checkpoint.name, time.monotonic()
            if self._upload(checkpoint) and self.is_first:
                took = f"{gb_or_mb(completeness.size_bytes(checkpoint))} in {any_time(time.monotonic() - began)}"
                console.say(f"{checkpoint.name} is at {self.store.uri}: {took}", style="cyan")
            self.current = ""

    def _upload(self, checkpoint: Path) -> bool:
        """Uploads this machine's files; on the first one also the model's description before, and the marker last."""
        state = self._retried(checkpoint, lambda: self._begin(checkpoint))
        names = [name for rank in self._ranks for name in marker.of_rank(marker.listed(checkpoint), rank, self._of)]
        steps: list[Callable[[], Any]] = [partial(self.store.put, checkpoint, name) for name in names]
        if self.is_first:
            steps = [partial(self.store.describe, self.output), *steps, partial(self.store.seal, checkpoint)]
            steps.append(lambda: self.store.retire(self.keep, self._best))
        if state == "complete" or (state and all(self._retried(checkpoint, step) for step in steps)):
            self._stored = checkpoint.name
        return self._stored == checkpoint.name

    def _begin(self, checkpoint: Path) -> str:
        if self._is_new and (other := self.store.newest()[0]):
            raise OSError(f"it holds {other} of another run")
        self._is_new = False
        return self.store.begin(checkpoint, self.is_first)

    def _retried(self, checkpoint: Path, action: Callable[[], Any]) -> Any:
        """Calls `action` until it succeeds, and returns its result or True.

        Returns False if the checkpoint is gone, a newer one waits, or time is over.
        """
        pause = 1.0
        while not self._over.is_set():
            try:
                return action() or True
            except Exception as error:  # each store has its own library, with its own classes
                trouble, is_wait = store.reason(error), isinstance(error, BlockingIOError)
            if self._newest != checkpoint.name or completeness.flaw(checkpoint):
                return False
            if trouble != self._trouble and not is_wait:
                what = f"{checkpoint.name} can't be uploaded to {self.store.uri}: {trouble}"
                console.say(f"{what}; training goes on, and so do the tries", style="yellow")
            self._trouble = trouble
            self._over.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        return False
