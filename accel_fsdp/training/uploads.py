"""Brings complete checkpoints to a store while training goes on (`--checkpoint_uri`)."""

import contextlib
import itertools
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from accel_fsdp import console
from accel_fsdp.checkpoints import Store, completeness, marker, store
from accel_fsdp.errors import UserError
from accel_fsdp.library_internals import Internal
from accel_fsdp.units import any_time, gb_or_mb

RELIES_ON = (Internal("torch.distributed.distributed_c10d:_get_default_store", ""),)
KEY = "accel_fsdp/upload"
_made = itertools.count()
"""Numbers the objects of a process, which are made in the same order on all ranks: each has keys of its own."""
OVER = "over"
GONE, DONE = "gone", "done"
"""What a rank says of its files of a checkpoint: one is no longer on this disk, or all are in the store."""
POLL_SECONDS = 0.5
NOTICED_SECONDS = 1.0
RANKS_PER_SECOND = 100
"""The most requests per second that the job's store has to answer."""
LONGEST_PAUSE_SECONDS = 60.0
"""Between two tries; the first comes after a second, and each pause is twice as long as the one before it."""
REPEATED_SECONDS = 600.0
"""The same trouble is logged again after this time."""


class Uploads:
    """Uploads one checkpoint at a time, with a thread on each rank; between two of them, the newest is the next.

    The first rank names a checkpoint through the job's store, each rank uploads the files that it wrote, and the first
    one its marker, once all have. A store that is down delays this, and never training. The threads are daemons: a rank
    that fails ends without them, and the next run uploads what is missing.
    """

    def __init__(self, place: Store, training: Any) -> None:
        self.store, self.output = place, Path(training.output_dir)
        self.keep, self.timeout_seconds = training.save_total_limit, training.upload_timeout
        self.rank, self.ranks = training.process_index, training.world_size
        self.poll_seconds = max(POLL_SECONDS, self.ranks / RANKS_PER_SECOND)
        self.current, self._best = "", ""
        self._waiting, self._closing, self._changed = "", False, threading.Condition()
        self._over = threading.Event()
        self._trouble, self._said_at = "", 0.0
        self._key, self._numbers = f"{KEY}/{next(_made)}", itertools.count()
        self._is_new, self._refused = False, False
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Begins, with the newest complete checkpoint here if the store lacks it. Call on all ranks."""
        if self.rank == 0:
            console.say(f"complete checkpoints are uploaded to {self.store.uri}", style="cyan")
            newest = completeness.choose(self.output).newest
            self._waiting, self._is_new = newest.name if newest else "", newest is None
        self._closing, self._thread = False, threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def offer(self, checkpoint: Path, best: str | None) -> None:
        """Uploads a checkpoint as soon as the one before it is there. Call on the first rank."""
        with self._changed:
            self._waiting, self._best = checkpoint.name, best or ""
            self._changed.notify()

    def finish(self) -> str:
        """Waits until the newest checkpoint is in the store, but not for ever. Call on all ranks.

        Returns, on the first rank, what is left and why; empty if nothing is.
        """
        with self._changed:
            self._closing = True
            self._changed.notify()
        thread, self._thread = self._thread, None
        if thread is None:
            return ""
        if self.rank != 0:
            thread.join()
            return ""
        thread.join(NOTICED_SECONDS)
        if thread.is_alive():
            console.say(f"waiting for uploads, {self.timeout_seconds:g} s at most", style="cyan")
        thread.join(max(self.timeout_seconds - NOTICED_SECONDS, 0))
        if not thread.is_alive() and not self.current and not self._refused:
            completeness.retire(self.output, self.keep, self._best)  # what had to stay until it was there
            return ""
        left = self._waiting or self.current or "all checkpoints"  # now: the thread drops them once time is over
        self._over.set()
        self._tell(OVER, "")
        return f"{left}: {self._trouble or 'still being uploaded'}"

    # The thread

    def _run(self) -> None:
        with contextlib.suppress(RuntimeError):  # the job's store has ended, with the rank or launcher that had it
            if self.rank == 0:
                self._lead()
            else:
                self._follow()

    def _lead(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                self.current, self._waiting = self._waiting, ""
            if not self.current:
                self._tell(f"{next(self._numbers)}", "")
                return
            if not self._is_of_others():
                self._bring_all(self.output / self.current)
            self.current = ""

    def _is_of_others(self) -> bool:
        """Whether the store of a new run, which may have been down at its start, holds the checkpoints of another."""
        found: list[str] = []
        if self._is_new and self._retried(lambda: found.append(self.store.newest()[0])):
            self._is_new, self._refused = False, bool(found[0])
            if self._refused:
                self._note(f"it holds {found[0]} of another run")
        return self._refused

    def _bring_all(self, checkpoint: Path) -> None:
        """Has all ranks upload their files of a checkpoint that the store lacks."""
        began, is_there = time.monotonic(), list[bool]()
        if not self._retried(lambda: is_there.append(self.store.begin(checkpoint))) or is_there[0]:
            return
        self._retried(partial(self.store.describe, self.output))
        number = next(self._numbers)
        self._tell(f"{number}", checkpoint.name)
        if self._bring(checkpoint) == DONE and self._all_done(number) and self._retried(self._complete):
            size = gb_or_mb(sum(marker.listed(checkpoint).values()))
            took = any_time(time.monotonic() - began)
            console.say(f"{checkpoint.name} is at {self.store.uri}: {size} in {took}", style="cyan")

    def _follow(self) -> None:
        for number in self._numbers:
            self.current = self._heard(f"{number}")
            if not self.current:
                return
            self._tell(f"{number}/{self.rank}", self._bring(self.output / self.current))

    def _bring(self, checkpoint: Path) -> str:
        """Uploads this rank's files, as often as it takes."""
        names = marker.of_rank(marker.listed(checkpoint), self.rank, self.ranks)
        return DONE if all(self._retried(partial(self.store.upload, checkpoint, name)) for name in names) else GONE

    def _complete(self) -> None:
        self.store.seal(self.output / self.current)
        self.store.retire(self.keep, self._best)

    def _retried(self, action: Callable[[], Any]) -> bool:
        """Calls `action` until it succeeds; false if the checkpoint is gone from this disk, or time is over."""
        pause = 1.0
        while not self._over.is_set():
            try:
                action()
                return True
            except Exception as error:  # each store has its own library, with its own classes
                if completeness.flaw(self.output / self.current):
                    return False
                self._note(store.reason(error))
            if self._is_over(pause):
                return False
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        return False

    def _all_done(self, number: int) -> bool:
        """Waits until all ranks have uploaded their files; false if one lacks some, or time is over."""
        for rank in range(1, self.ranks):
            while not (said := self._read(f"{number}/{rank}")):
                if trouble := self._read(f"why/{rank}"):
                    self._note(f"rank {rank}: {trouble}")
                if self._is_over(self.poll_seconds):
                    return False
            if said == GONE:
                return False
        return True

    def _note(self, trouble: str) -> None:
        is_new = trouble != self._trouble or time.monotonic() - self._said_at > REPEATED_SECONDS
        self._trouble = trouble
        if not is_new:
            return
        self._said_at = time.monotonic()
        if self.rank == 0:
            what = f"{self.current} can't be uploaded to {self.store.uri}: {trouble}"
            rest = "" if self._refused else ", and so do the tries"
            console.say(f"{what}; training goes on{rest}", style="yellow")
        else:
            self._tell(f"why/{self.rank}", trouble)

    def _is_over(self, seconds: float) -> bool:
        """Waits; returns whether the first rank has given up."""
        return self._over.wait(seconds) or (self.rank != 0 and self._read(OVER) is not None)

    # Messages between the ranks

    def _tell(self, key: str, text: str) -> None:
        if dist.is_initialized():
            distributed_c10d._get_default_store().set(f"{self._key}/{key}", text)

    def _read(self, key: str) -> str | None:
        store = distributed_c10d._get_default_store()
        name = f"{self._key}/{key}"
        return store.get(name).decode() if store.check([name]) else None

    def _heard(self, key: str) -> str:
        """Waits for a message; empty if time is over."""
        while (said := self._read(key)) is None:
            if self._is_over(self.poll_seconds):
                return ""
        return said


def begun(trainer: Any) -> Uploads | None:
    """The uploads that `--checkpoint_uri` asks for; else None. Call on all ranks.

    Raises:
        UserError: ranks don't share a folder.
    """
    args = trainer.args
    if not args.checkpoint_uri:
        return None
    if args.save_on_each_node:
        raise UserError(
            "--checkpoint_uri, where each machine has checkpoints of its own",
            why="only checkpoints in a folder of all ranks are uploaded",
            fix="leave out --checkpoint_uri",
        )
    return Uploads(Store(args.checkpoint_uri), args)
