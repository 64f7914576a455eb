"""What this package replaces, overrides or calls inside of its libraries, and the check that it is there as expected.

Such names belong to their library and may change in any version. A patch of something that is gone would do nothing,
or half of what it is for. So each module that reaches inside declares what it expects (`RELIES_ON`, `@patch`) and
checks it before it relies on it; a library that has changed then stops the command with what is missing and which
versions have it.
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
    """Something inside of a library: `path` is module:name, with dots in the name for what belongs to a class.

    `parameters` are the names that its calls here rely on, as in a signature: those before an asterisk are the first
    ones, in that order; those behind it are there somewhere. Without an asterisk there are no others. None: anything.
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
    """A change to a library that has a fault, which the docstring of `apply` describes. Called, it mends the library.

    `until` is the library's first version without the fault, in which a call does nothing; empty: every version so far
    has it. `why` says what would follow without the patch. A test shows the fault of each patch.
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
        """Changes the library, if it has the fault."""
        if self.is_needed:
            check(*self.relies_on, why=self.why)
            self.apply()


def patch(*relies_on: Internal, why: str, until: str = "") -> Callable[[Callable[[], None]], Patch]:
    """Makes a `Patch` of the function that applies it; the first of `relies_on` is in the library that it changes."""
    return lambda apply: Patch(apply, relies_on, why, until)


def check(*internals: Internal, why: str) -> None:
    """Holds the installed libraries against what is expected of them."""
    for one in internals:
        if found := flaw(one):
            raise lacks(one.library, found, why)


def flaw(one: Internal) -> str:
    """What is wrong with it, as the end of a sentence about the library; empty if nothing is."""
    module, _, name = one.path.partition(":")
    try:
        found: Any = import_module(module)
    except ModuleNotFoundError:
        return f"has no {module}"
    for part in name.split("."):
        if part in getattr(found, "__annotations__", {}):  # which instances have
            return ""
        if not hasattr(found, part):
            return f"has no {one.name}"
        found = getattr(found, part)
    if one.parameters is None or _fits(found, one.parameters):
        return ""
    return f"has {one.name}{_signature(found)}, not ({one.parameters.replace(' ', ', ')})"


def _fits(function: Any, expected: str) -> bool:
    return callable(function) and fits(list(inspect.signature(function).parameters), expected)


def fits(known: list[str], expected: str) -> bool:
    """Whether a function with these parameters takes what `Internal.parameters` expects."""
    first, rest, named = (part.split() for part in expected.partition("*"))
    begins = known[: len(first)] == first
    return begins and (set(named) <= set(known) if rest else len(known) == len(first))


def _signature(function: Any) -> str:
    return f"({', '.join(inspect.signature(function).parameters)})" if callable(function) else ", which is no function"
