"""The driver's side of a job on Ray: starts it, forwards signals to the ranks, and ends with the job's exit code."""

import contextlib
import math
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

from accel_fsdp import console
from accel_fsdp.errors import require
from accel_fsdp.launch import child_process
from accel_fsdp.launch.on_ray import actor
from accel_fsdp.units import counted

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
POLL_SECONDS = 0.2


def fit(trainer: Any, *, grace: int = 120, minutes: int | None = None) -> int:
    """Runs a `TorchTrainer` of `run_rank`; returns the exit code: 0, 75 after a checkpoint, or that of a failed rank.

    A signal to this process, and the end of the `minutes`, make the ranks save a checkpoint and stop, within `grace`
    seconds; a second signal ends them at once.
    """
    require("a job on Ray", "ray")
    import ray

    if not ray.is_initialized():
        ray.init()
    messages = actor.open_messages()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            trainer.fit()
        except BaseException as error:
            errors.append(error)

    running = threading.Thread(target=run, daemon=True)  # in the main thread Ray would answer Ctrl-C, without saving
    with _record_signals() as signals:
        running.start()
        _wait(running, messages, signals, grace, minutes * 60 if minutes else math.inf)
    code = 128 + signals[0] if running.is_alive() else _code(errors, *ray.get(messages.outcome.remote()))
    ray.shutdown()  # ends the remaining workers
    return code


@contextlib.contextmanager
def _record_signals() -> Iterator[list[int]]:
    """Records signals in the block; Ray's own handlers would end this process."""
    received: list[int] = []
    before = {number: signal.signal(number, lambda number, _: received.append(number)) for number in SIGNALS}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(running: threading.Thread, messages: Any, signals: list[int], grace: float, seconds: float) -> None:
    """Returns when the job has ended, or has to be killed because its ranks didn't stop after a signal."""
    import ray

    ends_at = time.monotonic() + seconds
    while running.is_alive() and not signals:
        running.join(POLL_SECONDS)
        if not signals and time.monotonic() > ends_at:
            signals.append(signal.SIGUSR1)
    if not running.is_alive():
        return
    name = signal.Signals(signals[0]).name
    console.say(f"{name}: training saves a checkpoint and stops; a second signal ends it at once", style="yellow")
    has_ranks = ray.get(messages.stop.remote(signals[0]))
    ends_at = time.monotonic() + grace
    while has_ranks and running.is_alive() and len(signals) == 1 and time.monotonic() < ends_at:
        running.join(POLL_SECONDS)


def _code(errors: list[BaseException], starts: int, over: int | None, failures: list[tuple[int, int]]) -> int:
    """The job's exit code after Ray has ended the job; prints which rank failed first."""
    if over is not None:
        return over
    times = counted(starts, "start")
    if failures:
        rank, code = failures[0]
        console.say(
            f"accel-fsdp: rank {rank} ended with {child_process.described(code)}, the last of {times}", style="red"
        )
        return code
    error = next(iter(errors), None)
    console.say(f"accel-fsdp: Ray ended the job after {times}: {error}", style="red", lines=True)
    return 1
