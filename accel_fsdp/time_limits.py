"""Time limits for calls that may never return: patterns and templates of untrusted files, disks, other machines."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

SOON = 1e-6
"""The shortest time of an alarm in seconds; 0 would turn it off."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Ends the block with a TimeoutError after that time; an earlier limit of a caller stays in force.

    Only the main thread of a POSIX system has such an alarm.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    outer_seconds, outer_interval = signal.getitimer(signal.ITIMER_REAL)
    if 0 < outer_seconds <= seconds:  # the outer limit ends this block first
        yield
        return

    def late(number: int, frame: object) -> None:
        raise TimeoutError(f"it takes more than {seconds:g} s")

    before, start = signal.signal(signal.SIGALRM, late), time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if outer_seconds:
            remaining = max(outer_seconds - (time.monotonic() - start), SOON)
            signal.setitimer(signal.ITIMER_REAL, remaining, outer_interval)


def comes_true(condition: Callable[[], bool], seconds: float, every: float = 0.2) -> bool:
    """Checks a condition again and again; returns whether it holds within that time."""
    deadline = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(every)
    return holds


def result_of(function: Callable[[], Any], seconds: float) -> Any:
    """Returns the result of `function`; None if it raises, or if it takes longer: then its thread goes on."""
    results: list[Any] = []

    def run() -> None:
        with suppress(Exception):
            results.append(function())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return next(iter(results), None)
