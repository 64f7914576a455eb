"""Cleans up after a rehearsal, in a small process that outlives it, even if it is killed.

It waits on a pipe that the rehearsal holds open. When the rehearsal writes a byte at its end, or the pipe closes
because it was killed, the janitor ends every process with the rehearsal's folder in its environment, and removes the
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

from accel_fsdp.launch import python_child

FOLDER = "ACCEL_FSDP_REHEARSAL"
"""The variable with which processes of a rehearsal must be started: it names the folder."""
SERVING = "from accel_fsdp.rehearsal import janitor; janitor.serve({!r})"


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """Creates a folder for a rehearsal; at the end removes it, and ends all processes that are marked with it."""
    place = Path(tempfile.mkdtemp(prefix="accel-fsdp-rehearsal-"))
    words = python_child.command(SERVING.format(str(place)))
    environment = {name: value for name, value in os.environ.items() if name != FOLDER}
    process = subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True, env=environment)
    try:
        yield place
    finally:
        process.communicate(b".")  # closing isn't enough: processes forked meanwhile hold the pipe open too


def serve(place: str) -> None:
    sys.stdin.buffer.read(1)
    end(place)
    shutil.rmtree(place, ignore_errors=True)


def end(place: str) -> None:
    """Kills every process of a rehearsal, including those that are started meanwhile."""
    while processes := [process for process in psutil.process_iter() if _belongs(process, place)]:
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(processes, timeout=1)


def _belongs(process: psutil.Process, place: str) -> bool:
    with contextlib.suppress(psutil.Error, OSError):
        alive = process.status() != psutil.STATUS_ZOMBIE
        return bool(alive and process.environ().get(FOLDER) == place)
    return False
