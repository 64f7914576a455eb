"""Leaves nothing behind: a small process that outlives the rehearsal, however that ends, and cleans up after it.

It waits on a pipe that the rehearsal holds open. At a word from it, when all is done, or when the pipe closes, because
the rehearsal was killed, it ends every process that has the rehearsal's folder in its environment, and removes the
folder.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

from accel_fsdp import python_child

FOLDER = "ACCEL_FSDP_REHEARSAL"
"""The variable by which processes of a rehearsal are known: it names the folder."""
SERVING = "from accel_fsdp.rehearsal import janitor; janitor.serve({!r})"


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A new folder for all that a rehearsal writes; afterwards neither it nor a process with its name is there."""
    place = Path(tempfile.mkdtemp(prefix="accel-fsdp-rehearsal-"))
    words = python_child.command(SERVING.format(str(place)))
    ours = {name: value for name, value in os.environ.items() if name != FOLDER}
    process = subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True, env=ours)
    try:
        yield place
    finally:
        process.communicate(b".")  # a word, as whoever was forked meanwhile holds the pipe open too


def mark(place: Path) -> dict[str, str]:
    """The variable that processes of a rehearsal must have when they are executed."""
    return {FOLDER: str(place)}


def serve(place: str) -> None:
    sys.stdin.buffer.read(1)
    end(place)
    shutil.rmtree(place, ignore_errors=True)


def end(place: str) -> None:
    """Kills every process of a rehearsal, those too that others of it start meanwhile."""
    while found := [process for process in psutil.process_iter() if _belongs(process, place)]:
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(found, timeout=1)


def _belongs(process: psutil.Process, place: str) -> bool:
    with contextlib.suppress(psutil.Error, OSError):
        alive = process.status() != psutil.STATUS_ZOMBIE
        return bool(alive and process.environ().get(FOLDER) == place)
    return False
