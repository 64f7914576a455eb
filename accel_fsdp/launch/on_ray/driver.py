"""The driver's side of a job on Ray: starts it, hands signals on to the ranks, and ends as training does."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

from accel_fsdp import console
from accel_fsdp.errors import require
from accel_fsdp.launch.on_ray import meeting
from accel_fsdp.launch.on_ray.worker import described
from accel_fsdp.units import counted

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
POLL_SECONDS = 0.2


def fit(trainer: Any, *, grace: int = 120, minutes: int | None = None) -> int:
    """Runs a `TorchTrainer` of `run_rank`; returns the exit code: 0, 75 after a checkpoint, or that of a failed rank.

    A signal to this process, and the end of the `minutes`, make the ranks save a checkpoint and stop, for which they
    have `grace` seconds; a second signal ends them at once.
    """
    require("a job on Ray", "ray")
    import ray

    if not ray.is_initialized():
        ray.init()
    messages = meeting.open_messages()
    running = _Running(trainer)
    stopping = Stopping(messages, grace, minutes)
    with stopping.listening():
        running.start()
        while running.is_alive() and not stopping.gives_up():
            running.join(POLL_SECONDS)
    code = stopping.code if running.is_alive() else _code(running.error, *ray.get(messages.outcome.remote()))
    ray.shutdown()  # which ends what is left of the workers
    return code


class _Running(threading.Thread):
    """Ray Train's own part. In the main thread it would answer Ctrl-C itself, by ending the ranks without saving."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(daemon=True)
        self._trainer = trainer
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._trainer.fit()
        except BaseException as error:
            self.error = error


class Stopping:
    """The wish to stop, from a signal or from the clock."""

    def __init__(self, messages: Any, grace: int, minutes: int | None) -> None:
        self._messages, self._grace = messages, grace
        self._ends_at = time.monotonic() + minutes * 60 if minutes else None
        self._noted: list[int] = []
        self._handed_on = 0
        self._asked_at = 0.0

    @property
    def code(self) -> int:
        """Of a job that was ended before its ranks could end."""
        return 128 + self._noted[0]

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Notes signals meanwhile; Ray's own handlers would end this process."""
        before = {number: signal.signal(number, self._note) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted.append(number)

    def gives_up(self) -> bool:
        """Hands on what was noted; returns whether the job is to be left to its end."""
        import ray

        now = time.monotonic()
        if self._ends_at and now > self._ends_at and not self._noted:
            self._noted.append(signal.SIGUSR1)
        if not self._noted:
            return False
        if self._handed_on:
            return len(self._noted) > 1 or now - self._asked_at > self._grace
        self._handed_on, self._asked_at = self._noted[0], now
        name = signal.Signals(self._handed_on).name
        console.say(f"{name}: training saves a checkpoint and stops; a second signal ends it at once", style="yellow")
        return not ray.get(self._messages.stop.remote(self._handed_on))


def _code(error: BaseException | None, starts: int, over: int | None, failures: list[tuple[int, int]]) -> int:
    """The job's, once Ray has ended it; says which rank failed first."""
    if over is not None:
        return over
    times = counted(starts, "start")
    if failures:
        rank, code = failures[0]
        console.say(f"accel-fsdp: rank {rank} ended with {described(code)}, the last of {times}", style="red")
        return code
    console.say(f"accel-fsdp: Ray ended the job after {times}: {error}", style="red", lines=True)
    return 1
