"""Ends a launcher whose ranks have failed, because torch's own would wait for a machine that is off.

torch's launcher would ask the rendezvous store, over a connection that is neither answered nor closed (torch 2.13).
"""

import contextlib
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil

from accel_fsdp import console
from accel_fsdp.launch_environment import FAILURE_FILE

LAUNCHER_SECONDS = 5.0
"""Seconds that torch's launcher may take to end after its last rank."""
RANKS_SECONDS = 45.0
"""Seconds that the launcher may take after a failed rank: it gives the other ranks 30 to end."""


@contextlib.contextmanager
def ends_after_its_ranks(folder: Path) -> Iterator[None]:
    """Ends this process with code 1 if a rank has failed, all have ended, and the block doesn't return.

    The folder is for the failed rank's note, and is removed with the process.
    """
    stop, note = threading.Event(), folder / "failed"
    os.environ[FAILURE_FILE] = str(note)
    threading.Thread(target=_watch, args=(note, stop), daemon=True).start()
    try:
        yield
    finally:
        stop.set()
        os.environ.pop(FAILURE_FILE)


def _watch(note: Path, stop: threading.Event) -> None:
    failed = alone = 0.0
    while not stop.wait(1.0):
        if not note.exists():
            continue
        failed += 1.0
        alone = 0.0 if _ranks() else alone + 1.0
        if alone >= LAUNCHER_SECONDS or failed >= _longest_wait():
            for rank in _ranks():
                with contextlib.suppress(psutil.NoSuchProcess):
                    rank.kill()
            console.say(f"accel-fsdp: a rank failed {failed:.0f} s ago, and torch's launcher hasn't ended since")
            shutil.rmtree(note.parent, ignore_errors=True)
            os._exit(1)


def _ranks() -> list[psutil.Process]:
    running = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            running += [child] if child.status() != psutil.STATUS_ZOMBIE else []
    return running


def _longest_wait() -> float:
    """`RANKS_SECONDS`, or longer if the launcher's own variable lets ranks take longer."""
    with contextlib.suppress(ValueError):
        return RANKS_SECONDS - 30.0 + float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"))
    return RANKS_SECONDS
