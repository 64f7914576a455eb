"""Recognizes a full disk in the different errors that libraries raise."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from accel_fsdp import atomic_files
from accel_fsdp.errors import UserError
from accel_fsdp.units import MIB, distinguishable, gib_or_mib

_FULL = re.compile(r"No space left on device|Not enough disk space|Disk quota exceeded|\(os error (28|122)\)")
"""Errors of the system, of libraries in Rust, and of datasets, which checks the space before it writes."""


def full(error: BaseException, folder: Path) -> str:
    """Says that the disk is full, if that is why `folder` could not be written; else empty.

    Call before half-written files are removed: torch's archive writer (2.13) reports a full disk only as
    "position 704 instead of 598".
    """
    free = shutil.disk_usage(atomic_files.existing_part(folder)).free
    is_full = free < MIB or any(_FULL.search(str(cause)) for cause in chain(error))
    return f"the disk is full, {gib_or_mib(free)} are free" if is_full else ""


def check_room(folder: Path, needed_bytes: int, text: str, why: str, fix: str) -> None:
    """Raises a UserError if the disk of `folder` has less free space; `text` names what takes it."""
    place = atomic_files.existing_part(folder)
    free = shutil.disk_usage(place).free
    if needed_bytes > free:
        needed, available = distinguishable(gib_or_mib, needed_bytes, free)
        raise UserError(f"{text} {needed}, {available} are free at {place}", why=why, fix=fix)


def chain(error: BaseException) -> Iterator[BaseException]:
    """The error and its causes; for a sharded checkpoint, the error of the first rank that failed."""
    while error is not None:
        if failures := getattr(error, "failures", None):  # torch's CheckpointException
            error = next(iter(failures.values()))[0]
        yield error
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
