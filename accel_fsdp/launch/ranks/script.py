"""Finds the line of the user's script where something happened: its innermost line on a stack."""

import os
import sys
import traceback
from types import FrameType


def line_of_stack(frame: FrameType | None) -> str:
    """As file:line; empty if the stack of `frame` has no line of the script's folder."""
    return line_of([(at.filename, at.lineno) for at in traceback.extract_stack(frame)])


def line_of_error(error: BaseException) -> str:
    """The same, from an error's traceback."""
    return line_of([(at.filename, at.lineno) for at in traceback.extract_tb(error.__traceback__)])


def is_calling(frame: FrameType | None) -> bool:
    """Whether the code of `frame` is the script's own, not a library's."""
    return frame is not None and _is_own(frame.f_code.co_filename)


def line_of(places: list[tuple[str, int | None]]) -> str:
    """The innermost line of the script, from a stack's files and lines, outermost first."""
    own = [f"{file}:{line}" for file, line in places if _is_own(file)]
    return own[-1] if own else ""


def _is_own(file: str) -> bool:
    if file.startswith("<"):  # <frozen runpy>, <string>: not a file
        return False
    return os.path.dirname(os.path.abspath(file)) == os.path.dirname(os.path.abspath(sys.argv[0]))
