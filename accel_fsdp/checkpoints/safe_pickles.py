"""Reads pickles as data: of the names in them none is imported, and nothing that they name is called.

Each admitted name becomes an `Inert` class or a plain value; any other name is an error. This reads the lists of
distributed checkpoints, without torch, whose own restricted reader (`saved_files`) loads files with tensors.
"""

import io
import pickle
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from accel_fsdp.errors import UserError
from accel_fsdp.untrusted_files import broken

ERRORS = (
    *(EOFError, ValueError, TypeError, LookupError, AttributeError, struct.error, OverflowError, RecursionError),
    *(MemoryError, pickle.UnpicklingError),
)
"""Exceptions of reading damaged bytes, here and in readers that use the result."""


class Inert:
    """Replaces a class of another library: accepts any arguments, items and state."""

    def __init__(self, *args: Any, **_: Any) -> None:
        self.args, self.state = args, None  # type: tuple[Any, ...], Any

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


def empty_dict(*_: Any) -> dict[Any, Any]:
    """A mapping of a special class, whose items follow in the pickle."""
    return {}


SETTINGS: Mapping[str, Callable[..., Any]] = {
    **{f"numpy.{core}.multiarray.{name}": Inert for core in ("core", "_core") for name in ("scalar", "_reconstruct")},
    **{f"numpy.{name}": Inert for name in ("dtype", "ndarray")},
    **dict.fromkeys(("argparse.Namespace", "types.SimpleNamespace"), Inert),
    **{f"datetime.{name}": Inert for name in ("date", "datetime", "timedelta")},
    **{f"builtins.{name}": Inert for name in ("int", "float", "str", "bool", "list", "dict")},
    "collections.defaultdict": empty_dict,
}
"""Names of settings and numbers that people save beside weights, with what replaces each."""


def names_code(path: Path, name: str) -> UserError:
    """The error for a pickle with a name that isn't admitted."""
    return UserError(
        f"{path} names {name}, which no checkpoint needs",
        why="reading it the usual way could run the code of the file's author; nothing was executed",
        fix="if the file is yours, save only the weights: torch.save(model.state_dict(), FILE); "
        "else don't load it, and get the checkpoint again from where it was written",
    )


class _Reader(pickle.Unpickler):
    def __init__(self, content: bytes, admitted: Mapping[str, Any], path: Path) -> None:
        super().__init__(io.BytesIO(content))
        self.admitted, self.path = admitted, path

    def find_class(self, module: str, name: str) -> Any:
        full_name = f"{'builtins' if module == '__builtin__' else module}.{name}"
        if full_name not in self.admitted:
            raise names_code(self.path, full_name)
        return self.admitted[full_name]


def unpickle(content: bytes, admitted: Mapping[str, Any], path: Path) -> Any:
    """The object in a pickle of admitted names, with what they are mapped to.

    Raises:
        UserError: it holds another name, or is damaged.
    """
    try:
        return _Reader(content, admitted, path).load()
    except ERRORS as error:
        raise broken(path, f"is damaged: {type(error).__name__} in its pickle") from error
