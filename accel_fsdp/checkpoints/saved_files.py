"""Opens files of torch.save by torch's own restricted reader, mapped into memory: tensors and plain data, no code."""

import logging
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from accel_fsdp import untrusted_files
from accel_fsdp.checkpoints import deepspeed_files
from accel_fsdp.checkpoints.safe_pickles import ERRORS, SETTINGS, Inert, names_code
from accel_fsdp.checkpoints.stored import Mapped, Stored, short_name
from accel_fsdp.untrusted_files import broken

INERT: list[Any] = [
    *((replacement, name) for name, replacement in SETTINGS.items()),
    *((Inert, name) for name in deepspeed_files.CLASSES if not name.endswith("Enum")),
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
]
"""Names besides those of tensors that files may contain, with what torch takes for each."""
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
        with untrusted_files.opened(path):  # refuses links out of the folder, pipes and devices
            pass
    except FileNotFoundError as error:
        raise broken(path, "is missing") from error
    return restricted(path, path, mmap=True)


def restricted(source: Any, path: Path, mmap: bool = False) -> Any:
    """What torch loads from a source, such as a part of the file at `path`, with tensors and plain data alone."""
    from torch.distributed import tensor as _  # noqa: F401  # it admits the files of ranks

    meshes = logging.getLogger("torch.distributed.device_mesh")
    level = meshes.level
    meshes.setLevel(logging.ERROR)  # it warns of groups of ranks, which no reader has
    try:
        with torch.serialization.safe_globals(INERT):
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    except (OSError, RuntimeError, *ERRORS) as error:
        if isinstance(error, pickle.UnpicklingError) and (name := UNSAFE.search(str(error))):
            raise names_code(path, name[1]) from None
        text = str(error).partition("\n")[0][:100]
        raise broken(path, f"is damaged: not a file of torch.save's zip format (torch 1.6 or newer): {text}") from error
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

    def tensor(self, keys: Keys) -> torch.Tensor:
        """The tensor under these keys of the content."""
        value = self._at(keys)
        return self._at(keys, value.nbytes) if isinstance(value, torch.Tensor) else value  # type: ignore[no-any-return]

    def part(self, keys: Keys, start: int, stop: int) -> torch.Tensor:
        """Elements `start` to `stop` of a vector."""
        item = self._at(keys).element_size()
        vector: torch.Tensor = self._at(keys, (stop - start) * item)
        return vector[start:stop]

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
