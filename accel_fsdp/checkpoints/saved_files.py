"""Opens files of torch.save by torch's own restricted reader, mapped into memory: tensors and plain data, no code."""

import logging
import pickle
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from accel_fsdp import untrusted_files
from accel_fsdp.checkpoints.stored import Mapped, Stored, short_name
from accel_fsdp.errors import UserError, first_line
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


def names_code(path: Path, name: str) -> UserError:
    """The error for a pickle with a name that isn't admitted."""
    return UserError(
        f"{path} names {name}, which no checkpoint needs",
        why="reading it the usual way could run the code of the file's author; nothing was executed",
        fix="if the file is yours, save only the weights: torch.save(model.state_dict(), FILE); "
        "else don't load it, and get the checkpoint again from where it was written",
    )


INERT: list[Any] = [
    *((Inert, f"numpy.{core}.multiarray.{n}") for core in ("core", "_core") for n in ("scalar", "_reconstruct")),
    *((Inert, f"numpy.{name}") for name in ("dtype", "ndarray")),
    *((Inert, name) for name in ("argparse.Namespace", "types.SimpleNamespace")),
    *((Inert, f"datetime.{name}") for name in ("date", "datetime", "timedelta")),
    *((Inert, f"builtins.{name}") for name in ("int", "float", "str", "bool", "list", "dict")),
    (lambda *_: {}, "collections.defaultdict"),  # its items follow in the pickle
    *((Inert, f"deepspeed.runtime.fp16.loss_scaler.{name}") for name in ("LossScaler", "DynamicLossScaler")),
    (Inert, "deepspeed.utils.tensor_fragment.fragment_address"),
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
]
"""Names besides those of tensors that files may contain, with what torch takes for each: settings and numbers that
people save beside weights, and DeepSpeed's classes, of which only the stage's number is needed."""
UNSAFE = re.compile(r"GLOBAL (\S+)")
"""torch's message for a name that is refused."""
Keys = tuple[Any, ...]
"""The keys and numbers that lead to a tensor of a file's content."""


def load(path: Path) -> Any:
    """The content of a file, its tensors mapped into memory.

    Raises:
        UserError: the file is missing, damaged or names something else.
    """
    try:
        untrusted_files.check(path)  # refuses links out of the folder, pipes and devices
    except FileNotFoundError as error:
        raise broken(path, "is missing") from error
    from torch.distributed import tensor as _  # noqa: F401  # it admits the files of ranks

    return restricted(path, path, mmap=True)


def restricted(source: Any, path: Path, mmap: bool = False) -> Any:
    """What torch loads from a source, such as a part of the file at `path`, with tensors and plain data alone."""
    meshes = logging.getLogger("torch.distributed.device_mesh")
    level = meshes.level
    meshes.setLevel(logging.ERROR)  # it warns of groups of ranks, which no reader has
    try:
        with torch.serialization.safe_globals(INERT):
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    except (OSError, RuntimeError, *ERRORS) as error:
        if isinstance(error, pickle.UnpicklingError) and (name := UNSAFE.search(str(error))):
            raise names_code(path, name[1]) from None
        what = f"is damaged: not a file of torch.save's zip format (torch 1.6 or newer): {first_line(error)[:100]}"
        raise broken(path, what) from error
    finally:
        meshes.setLevel(level)


class SavedFile:
    """A file of torch.save, whose tensors are loaded one by one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mapped = Mapped(lambda: load(path))

    @property
    def content(self) -> Any:
        return self._mapped.get()

    def tensor(self, keys: Keys, part: slice | None = None) -> torch.Tensor:
        """The tensor under these keys of the content, or a part of a vector."""
        value: torch.Tensor = self._at(keys)
        if part is None:
            return self._at(keys, value.nbytes)  # type: ignore[no-any-return]
        return self._at(keys, value[part].nbytes)[part]  # type: ignore[no-any-return]

    def _at(self, keys: Keys, size_bytes: int = 0) -> Any:
        value = self._mapped.get(size_bytes)
        for key in keys:
            value = value[key]
        return value

    def stored(self, keys: Keys) -> Stored:
        tensor = self._at(keys)
        short_name(tensor.dtype, self.path)
        return Stored(tuple(tensor.shape), tensor.dtype, lambda: self.tensor(keys))


def tensors(path: Path) -> dict[tuple[str, ...], Stored]:
    """All tensors of a file by the keys that lead to them."""
    file = SavedFile(path)
    return {tuple(map(str, keys)): file.stored(keys) for keys in keys_of(file.content)}


def keys_of(content: Any, keys: Keys = ()) -> Iterator[Keys]:
    """The keys of each tensor of a content."""
    if isinstance(content, torch.Tensor):
        yield keys
    inner = content.items() if isinstance(content, dict) else ()
    for key, value in enumerate(content) if isinstance(content, (list, tuple)) else inner:
        yield from keys_of(value, (*keys, key))
