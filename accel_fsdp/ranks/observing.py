"""The observers inside a rank, and the library internals that they need; changed ones are reported in one line."""

import functools
import sys
from collections.abc import Callable
from importlib import metadata
from types import FrameType
from typing import Any

from accel_fsdp import console
from accel_fsdp.errors import in_a_line
from accel_fsdp.launch_environment import LaunchEnvironment
from accel_fsdp.library_internals import Internal, flaw
from accel_fsdp.ranks import events, script

is_paused = False
"""Whether modules run that aren't the script's, such as those of a small model that is tried."""


class Observation:
    """`what` is observed through the internals that it `relies_on`."""

    def __init__(self, what: str, *relies_on: Internal) -> None:
        self.what, self.relies_on = what, relies_on

    @property
    def is_possible(self) -> bool:
        """Whether the libraries have all internals; if not, logs what isn't observed. Read it once, before patching."""
        for internal in self.relies_on:
            if missing := flaw(internal):
                why = f"{internal.library} {metadata.version(internal.library)} {missing}"
                events.report("unwatched", what=self.what, why=why)
                if LaunchEnvironment.now().rank == 0:
                    console.say(f"accel-fsdp: not watched: {self.what}; {why}")
                return False
        return True


_reported: set[tuple[str, str]] = set()
"""Errors of observers that were reported; each is once."""


def guarded(callback: Callable[..., Any]) -> Callable[..., Any]:
    """A function that observes: an error of it ends neither the script nor the rest of the record, and is reported."""

    @functools.wraps(callback)
    def observe(*args: Any, **kwargs: Any) -> Any:
        try:
            return callback(*args, **kwargs)
        except Exception as error:  # of a library's or the user's object
            what, why = getattr(callback, "__qualname__", "an observer"), in_a_line(error)
            if (what, why) not in _reported:
                _reported.add((what, why))
                events.report("unwatched", what=what, why=why)
            return None

    return observe


def caller() -> FrameType | None:
    """The frame that called a watched function."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and script.is_of_watch(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def before(owner: Any, name: str, callback: Callable[..., None]) -> None:
    """Calls `callback` with the same arguments before each call of a function."""
    observe = guarded(callback)

    def watched(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        observe(*args, **kwargs)
        return original(*args, **kwargs)

    replace(owner, name, watched)


def after(owner: Any, name: str, callback: Callable[..., None]) -> None:
    """Calls `callback` with the same arguments after each call of a function."""
    observe = guarded(callback)

    def watched(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        observe(*args, **kwargs)
        return result

    replace(owner, name, watched)


def replace(owner: Any, name: str, wrapper: Callable[..., Any]) -> Callable[[], None]:
    """Replaces a function by `wrapper`, called with the original and the arguments.

    Returns a function that undoes it.
    """
    original = getattr(owner, name)

    @functools.wraps(original)
    def watched(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(owner, name, watched)
    return lambda: setattr(owner, name, original)
