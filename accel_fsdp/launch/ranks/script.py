"""Where in the user's own script something happened: the innermost of its lines on a stack."""

import os
import sys
import traceback
from types import FrameType


def line_of_stack(frame: FrameType | None) -> str:
    """As file:line; empty where no line of the script's folder is on the stack of `frame`."""
    return line_of([(at.filename, at.lineno) for at in traceback.extract_stack(frame)])


def line_of_error(error: BaseException) -> str:
    """The same, of what led to an error."""
    return line_of([(at.filename, at.lineno) for at in traceback.extract_tb(error.__traceback__)])


def is_calling(frame: FrameType | None) -> bool:
    """Whether the code of `frame` is the script's own, not a library's."""
    return frame is not None and _is_own(frame.f_code.co_filename)


def line_of(places: list[tuple[str, int | None]]) -> str:
    """The innermost line of the script, of a stack's files and lines, outermost first."""
    own = [f"{file}:{line}" for file, line in places if _is_own(file)]
    return own[-1] if own else ""


def _is_own(file: str) -> bool:
    if file.startswith("<"):  # <frozen runpy>, <string>: no file at all
        return False
    return os.path.dirname(os.path.abspath(file)) == os.path.dirname(os.path.abspath(sys.argv[0]))
