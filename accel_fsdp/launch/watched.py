"""Runs any script as one rank, exactly as Python would, with a watch against hangs beside it.

The watch begins when the script has started torch's process group; it imports torch only after the script does.
"""

import os
import sys
import threading
from importlib.machinery import SourceFileLoader
from types import TracebackType
from typing import TYPE_CHECKING, Any

import psutil  # noqa: F401  # here, not in a thread while the script may fork

from accel_fsdp.checkpoints import completeness  # noqa: F401
from accel_fsdp.launch import rendezvous  # noqa: F401
from accel_fsdp.launch.ranks import hang  # noqa: F401

if TYPE_CHECKING:
    from accel_fsdp.launch.script_watch import ScriptWatch

ASK_SECONDS = 0.5
EMPTY: dict[str, Any] = {"__annotations__": {}, "__cached__": None}
"""Names that some versions of Python give a script."""
_watches: list["ScriptWatch"] = []
_over = threading.Event()


def run() -> None:
    """Runs the script that the command line names after the seconds, in `__main__`; ends as Python would."""
    _, seconds, *sys.argv = sys.argv
    path = sys.argv[0]
    if not sys.flags.safe_path:
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    limit = float(seconds) if seconds[0].isdigit() else None
    threading.Thread(target=_begin, args=(threading.get_ident(), limit), daemon=True).start()
    names = vars(sys.modules["__main__"])
    try:
        absolute = os.path.abspath(path)  # as Python names the script, whatever was typed
        with open(path, "rb") as file:
            code = compile(file.read(), absolute, "exec", dont_inherit=True)
        of_python = {name: value for name, value in EMPTY.items() if name in names}
        names.clear()
        names.update(_names_of_script(absolute) | of_python)
        exec(code, names)
    except Exception as error:
        if _watches:
            _watches[0].failed(error)
        error.__traceback__ = _below_this_file(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)
    finally:
        end()


def end() -> None:
    """Ends the watch, if it has begun: the script has ended, or watches itself."""
    _over.set()
    while _watches:
        _watches.pop().leave()


def _names_of_script(path: str) -> dict[str, Any]:
    here = {"__name__": "__main__", "__file__": path, "__loader__": SourceFileLoader("__main__", path)}
    return {**here, "__builtins__": sys.modules["builtins"], **dict.fromkeys(("__doc__", "__package__", "__spec__"))}


def _below_this_file(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames of this module; None for an error in the script's syntax."""
    while trace and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def _begin(main: int, seconds: float | None) -> None:
    """Waits until the script has joined the other ranks."""
    while not _over.wait(ASK_SECONDS):
        dist = sys.modules.get("torch.distributed")
        if dist is None or not getattr(dist, "is_initialized", bool)():
            continue
        if dist.get_world_size() < 2:
            return
        from accel_fsdp.launch.script_watch import ScriptWatch

        _watches.append(ScriptWatch(seconds))
        _watches[0].try_to_begin(main)
        return
