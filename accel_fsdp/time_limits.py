"""Time limits for calls that may never return: patterns and templates of untrusted files, disks, other machines."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Ends the block with a TimeoutError after that time. Only the main thread of a POSIX system has such an alarm."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def late(number: int, frame: object) -> None:
        raise TimeoutError(f"it takes more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def result_of(act: Callable[[], Any], seconds: float) -> Any:
    """Returns the result of `act`; None if it raises, or takes longer. Then its thread is left behind."""
    results: list[Any] = []

    def run() -> None:
        with suppress(Exception):
            results.append(act())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return next(iter(results), None)
