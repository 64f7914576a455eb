"""Declares the library internals that this package replaces, overrides or calls, and checks that they are as expected.

Internals may change in any version of their library. A patch of a missing function would have no effect, or only half
of it. So each module declares the internals that it expects (`RELIES_ON`, `@patch`) and checks it before use; if a
library has changed, the command stops, and names the missing internal and the versions that have it.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from accel_fsdp.errors import lacks

TRAINER = "transformers:Trainer"
"""The class that the trainers of this package derive from."""


@dataclass(frozen=True)
class Internal:
    """An internal of a library: `path` is module:name, with dots in the name for members of a class.

    `parameters` are the names that calls rely on, as in a signature: those before an asterisk come first, in that
    order; those after it exist anywhere. Without an asterisk there are no others. None: not checked.
    """

    path: str
    parameters: str | None = None

    @property
    def name(self) -> str:
        return self.path.replace(":", ".")

    @property
    def library(self) -> str:
        return self.path.partition(":")[0].partition(".")[0]


@dataclass(frozen=True)
class Patch:
    """A patch for a fault of a library, which the docstring of `apply` describes. Call it to apply the patch.

    `until` is the library's first version without the fault, in which a call does nothing; empty: every version so far
    has it. `why` is the consequence without the patch. A test shows the fault of each patch.
    """

    apply: Callable[[], None]
    relies_on: tuple[Internal, ...]
    why: str
    until: str = ""

    @property
    def library(self) -> str:
        return self.relies_on[0].library

    @property
    def is_needed(self) -> bool:
        from importlib import metadata

        from packaging.version import Version

        return not self.until or Version(metadata.version(self.library)) < Version(self.until)

    def __call__(self) -> None:
        if self.is_needed:
            check(*self.relies_on, why=self.why)
            self.apply()


def patch(*relies_on: Internal, why: str, until: str = "") -> Callable[[Callable[[], None]], Patch]:
    """Turns the function that applies a patch into a `Patch` of the library of the first of `relies_on`."""
    return lambda apply: Patch(apply, relies_on, why, until)


def check(*internals: Internal, why: str) -> None:
    """Raises unless the installed libraries have all internals as expected."""
    for internal in internals:
        if problem := flaw(internal):
            raise lacks(internal.library, problem, why)


def flaw(internal: Internal) -> str:
    """The difference of an internal from its expected form, as the end of a sentence about its library; or empty."""
    module, _, name = internal.path.partition(":")
    try:
        member: Any = import_module(module)
    except ModuleNotFoundError:
        return f"has no {module}"
    for part in name.split("."):
        if part in getattr(member, "__annotations__", {}):  # an attribute of instances
            return ""
        if not hasattr(member, part):
            return f"has no {internal.name}"
        member = getattr(member, part)
    if internal.parameters is None or _fits(member, internal.parameters):
        return ""
    return f"has {internal.name}{_signature(member)}, not ({internal.parameters.replace(' ', ', ')})"


def _fits(function: Any, expected: str) -> bool:
    return callable(function) and fits(list(inspect.signature(function).parameters), expected)


def fits(known: list[str], expected: str) -> bool:
    """Whether a function with these parameters takes what `Internal.parameters` expects."""
    first, rest, keyword_only = (part.split() for part in expected.partition("*"))
    has_first = known[: len(first)] == first
    return has_first and (set(keyword_only) <= set(known) if rest else len(known) == len(first))


def _signature(function: Any) -> str:
    return f"({', '.join(inspect.signature(function).parameters)})" if callable(function) else ", which isn't callable"
