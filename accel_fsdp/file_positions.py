"""Reads and writes at a position of an open file, from several threads.

POSIX has calls for it. On Windows a thread moves the position of the file while the others wait.
"""

import os
import threading

_one_at_a_time = threading.Lock()
_HAS_CALLS = hasattr(os, "preadv") and hasattr(os, "pwrite")


def read_at(descriptor: int, view: memoryview, at: int) -> int:
    """Fills `view` from byte `at` on; returns how many bytes were read, fewer than asked for at the end of the file.

    Raises:
        OSError: the disk fails.
    """
    if _HAS_CALLS:
        return os.preadv(descriptor, [view], at)
    with _one_at_a_time:
        os.lseek(descriptor, at, os.SEEK_SET)
        content = os.read(descriptor, len(view))
    view[: len(content)] = content
    return len(content)


def write_at(descriptor: int, content: bytes | memoryview, at: int) -> None:
    """Writes all of `content` from byte `at` on.

    Raises:
        OSError: the disk is full, or fails.
    """
    rest = memoryview(content)
    while rest:
        if _HAS_CALLS:
            written = os.pwrite(descriptor, rest, at)
        else:
            with _one_at_a_time:
                os.lseek(descriptor, at, os.SEEK_SET)
                written = os.write(descriptor, rest)
        rest, at = rest[written:], at + written
