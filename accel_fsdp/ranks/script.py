"""Runs the user's script as Python would, and finds its line where something happened."""

import functools
import linecache
import os
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

OF_SOME_PYTHONS: dict[str, Any] = {"__annotations__": {}, "__cached__": None}
"""Names that some versions of Python give a script."""
LIBRARIES = frozenset(
    {
        *("site-packages", "dist-packages", "torch", "accelerate", "transformers", "peft", "trl", "deepspeed"),
        *("datasets", "bitsandbytes", "accel_fsdp"),
    }
)
"""Folders of code that isn't the user's own, also in a clone of a library in whose folder a script runs."""
STARTERS = ("<string>", "<frozen runpy>")
"""The files of Python's frames that start the watch."""


def run(path: str) -> None:
    """Executes a script in `__main__`, with the names that Python would define."""
    absolute = os.path.abspath(path)  # as Python names it, for any typed path
    with open(path, "rb") as file:
        code = compile(file.read(), absolute, "exec", dont_inherit=True)
    names = vars(sys.modules["__main__"])
    variables = {name: value for name, value in OF_SOME_PYTHONS.items() if name in names}
    variables |= {"__name__": "__main__", "__file__": absolute, "__loader__": SourceFileLoader("__main__", absolute)}
    variables |= {"__builtins__": sys.modules["builtins"], **dict.fromkeys(("__doc__", "__package__", "__spec__"))}
    names.clear()
    names.update(variables)
    exec(code, names)


def show_error(error: BaseException) -> None:
    """Prints an error of the script as Python would: the traceback begins with the script's own frame."""
    trace = error.__traceback__
    while trace and trace.tb_frame.f_globals is not vars(sys.modules["__main__"]):
        trace = trace.tb_next
    error.__traceback__ = trace
    seen: BaseException | None = error
    while seen is not None:
        seen.__traceback__ = _without_watch(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__
    sys.excepthook(type(error), error, error.__traceback__)


def _without_watch(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames of the functions that watch the script."""
    entries: list[TracebackType] = []
    while trace is not None:
        entries += [] if is_of_watch(trace.tb_frame.f_code.co_filename) else [trace]
        trace = trace.tb_next
    for entry in reversed(entries):
        trace = TracebackType(trace, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return trace


def is_of_watch(file: str) -> bool:
    """Whether a file is code that watches or starts the script, which its stack shows between other frames."""
    return file in STARTERS or os.path.dirname(file) == os.path.dirname(__file__)


def line_of_stack(frame: FrameType | None) -> str:
    """The script's line as file:line; empty if the stack of `frame` has no line of the project."""
    return line_of([(at.filename, at.lineno) for at in traceback.extract_stack(frame)])


def line_of_call(frame: FrameType | None, module: "nn.Module") -> str:
    """The script's line that calls `module`; methods of other modules, which pass a call on to it, are left out."""
    from torch import nn

    calls = []
    for at, line in traceback.walk_stack(frame):
        caller = at.f_locals.get("self")
        if caller is module or not isinstance(caller, nn.Module):
            calls.append((at.f_code.co_filename, line))
    return line_of(calls[::-1])


def line_of_error(error: BaseException) -> str:
    """The script's line as file:line, from an error's traceback."""
    return line_of([(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)])


def is_calling(frame: FrameType | None) -> bool:
    """Whether the code of `frame`, below functions that watch it, is the script's own, not a library's."""
    while frame is not None and is_of_watch(frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None and is_own(frame.f_code.co_filename)


def line_of(places: Sequence[tuple[str, int | None]]) -> str:
    """The innermost line of the script among a stack's files and lines, outermost first; with the folder as typed."""
    own = [(file, line) for file, line in places if is_own(file)]
    if not own:
        return ""
    file, line = os.path.abspath(own[-1][0]), own[-1][1]
    started = _started or Project.of(sys.argv[0])
    return f"{os.path.relpath(file, started.folder) if started.is_relative else file}:{line}"


def nearest_line(line: str, *words: str) -> str:
    """The line with one of `words` that is nearest to `line`, both as file:line; `line` itself if there is none.

    It explains `line`, as what clears gradients, or keeps them on a rank.
    """
    path, _, number = line.rpartition(":")
    lines = enumerate(linecache.getlines(path), 1)
    places = [at for at, text in lines if any(word in text for word in words)]
    return f"{path}:{min(places, key=lambda at: abs(at - int(number)))}" if places else line


def has_line_with(*words: str) -> bool:
    """Whether the script, or a module of its project that it has imported, has a line with one of `words`."""
    files = {str(getattr(module, "__file__", "")) for module in tuple(sys.modules.values())}
    lines = [line for file in filter(is_own, files) for line in linecache.getlines(file)]
    return any(word in line for line in lines for word in words)


@dataclass(frozen=True)
class Project:
    """The user's own code is what lies in `root`; `folder` is where the script was started."""

    root: str
    folder: str
    is_relative: bool

    @classmethod
    def of(cls, script: str) -> "Project":
        """Its root is the current folder if the script lies in it, else the script's folder."""
        folder, of_script = os.getcwd(), os.path.dirname(os.path.abspath(script))
        is_inside = os.path.commonpath([folder, of_script]) == folder
        return cls(folder if is_inside else of_script, folder, not os.path.isabs(script))


_started: Project | None = None


def begin() -> None:
    """Fixes the project before the script may change its folder."""
    global _started
    _started = Project.of(sys.argv[0])


def is_own(file: str) -> bool:
    """Whether a file belongs to the script's project, and is neither installed nor of a library beside it."""
    return not file.startswith("<") and _is_in((_started or Project.of(sys.argv[0])).root, os.path.abspath(file))


@functools.cache
def _is_in(root: str, path: str) -> bool:
    if not path.startswith(os.path.join(root, "")) or path.startswith(os.path.join(sysconfig.get_path("stdlib"), "")):
        return False
    return LIBRARIES.isdisjoint(os.path.relpath(path, root).split(os.sep)[:-1])
