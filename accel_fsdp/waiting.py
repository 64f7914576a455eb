"""Waits for conditions, and shows where other threads wait: their stacks, and how long they waited for a core.

A reference to a frame keeps its locals alive, and so the tensors in them. A thread that reads the main thread's stack
every second delays their release until it is done, on a busy machine until it is next scheduled.
"""

import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import CodeType
from typing import NamedTuple

UNSEEN_SECONDS = 5.0
"""Seconds that `stack_of` waits for the end of `unseen`, so that a thread that hangs there is shown too."""
_looking = threading.Lock()


class FrameLocation(NamedTuple):
    """One frame of a stack: the code, and the line in it."""

    code: CodeType
    line: int | None


@contextmanager
def unseen() -> Iterator[None]:
    """In the block, `stack_of` holds no frames of other threads, so that releases happen when the code makes them."""
    with _looking:
        yield


def stack_of(thread: int) -> list[FrameLocation]:
    """The stack of a thread of this process, innermost frame first; empty if the thread has ended."""
    waited = _looking.acquire(timeout=UNSEEN_SECONDS)
    try:
        frame, stack = sys._current_frames().get(thread), list[FrameLocation]()
        while frame:
            stack.append(FrameLocation(frame.f_code, frame.f_lineno))
            frame = frame.f_back
        return stack
    finally:
        if waited:
            _looking.release()


def text_of(stack: Sequence[FrameLocation]) -> str:
    frames = [
        traceback.FrameSummary(location.code.co_filename, location.line, location.code.co_name)
        for location in reversed(stack)
    ]
    return "".join(traceback.format_list(frames))


def delayed_seconds() -> float:
    """How long the threads of this process were ready to run and had no core, on Linux; elsewhere 0."""
    nanoseconds = 0
    for task in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError, ValueError, IndexError):
            nanoseconds += int(task.read_text().split()[1])
    return nanoseconds / 1e9


def comes_true(condition: Callable[[], bool], seconds: float, every: float = 0.2) -> bool:
    """Checks a condition again and again; returns whether it holds within that time."""
    deadline = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(every)
    return holds
