"""Runs any script as one rank, exactly as Python would, with a watch against hangs beside it.

The watch begins when the script has started torch's process group; it imports torch only after the script does.
"""

import os
import sys
import threading
from typing import TYPE_CHECKING

import psutil  # noqa: F401  # here, not in a thread while the script may fork

from accel_fsdp.checkpoints import completeness  # noqa: F401
from accel_fsdp.launch import rendezvous  # noqa: F401
from accel_fsdp.ranks import hang, script  # noqa: F401

if TYPE_CHECKING:
    from accel_fsdp.launch.script_watch import ScriptWatch

POLL_SECONDS = 0.5
_watches: list["ScriptWatch"] = []
_over = threading.Event()


def run() -> None:
    """Runs the script on the command line, after the seconds, and exits as Python would."""
    _, seconds, *sys.argv = sys.argv
    if not getattr(sys.flags, "safe_path", False):  # Python 3.10 has none
        sys.path.insert(0, os.path.dirname(os.path.realpath(sys.argv[0])))
    limit = float(seconds) if seconds[0].isdigit() else None
    threading.Thread(target=_begin, args=(threading.get_ident(), limit), daemon=True).start()
    try:
        script.run(sys.argv[0])
    except Exception as error:
        if _watches:
            _watches[0].failed(error)
        script.show_error(error)
        sys.exit(1)
    finally:
        end()


def end() -> None:
    """Ends the watch, if it has begun: called when the script has ended, or begins its own watch."""
    _over.set()
    while _watches:
        _watches.pop().leave()


def _begin(main: int, seconds: float | None) -> None:
    """Waits until the script has joined the other ranks."""
    while not _over.wait(POLL_SECONDS):
        dist = sys.modules.get("torch.distributed")
        if dist is None or not getattr(dist, "is_initialized", bool)():
            continue
        if dist.get_world_size() < 2:
            return
        from accel_fsdp.launch.script_watch import ScriptWatch

        _watches.append(ScriptWatch(seconds))
        _watches[0].try_to_begin(main)
        return
