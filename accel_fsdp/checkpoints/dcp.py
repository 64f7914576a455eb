"""Distributed checkpoints of torch (DCP): `.metadata`, read as inert values, and tensors in `.distcp` files.

`.metadata` is a pickle, and loading it the usual way runs the code that it names. Here none of its names is
imported: each admitted one becomes an `Inert` class or a plain value, and any other is an error.
"""

import contextlib
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from accel_fsdp import untrusted_files
from accel_fsdp.checkpoints import file_names, saved_files
from accel_fsdp.checkpoints.safetensors_header import DTYPES
from accel_fsdp.checkpoints.saved_files import ERRORS, Inert, names_code
from accel_fsdp.checkpoints.stored import Box, Stored, assembled, torch_dtype
from accel_fsdp.untrusted_files import broken

TORCH_READER = ThreadPoolExecutor(1)
"""A thread for torch's reader: while that calls a file of Python, it would lose the exception of a signal."""
Keys = tuple[str, ...]
Item = tuple[Path, int, int]
"""The place of a chunk, which is an archive of one tensor or value: file, start and length."""


class _Bytes(Inert):
    pass


DCP, FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
PATHS = ("Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
_KINDS = ("Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "MetadataIndex")
ADMITTED: Mapping[str, Any] = {
    **{f"{DCP}.{name}": Inert for name in (*_KINDS, "StorageMeta", "_MEM_FORMAT_ENCODING")},
    f"{DCP}.BytesStorageMetadata": _Bytes,
    f"{FILES}._StorageInfo": Inert,
    **dict.fromkeys(("builtins.getattr", "torch.Size", "torch.serialization._get_layout"), Inert),
    **{f"{module}.{name}": Inert for module in ("pathlib", "pathlib._local") for name in PATHS},
    **{f"torch.{name}": name for name in DTYPES},
    "collections.OrderedDict": OrderedDict,
    "builtins.set": set,
}
"""The names that a `.metadata` file may contain, each with the inert value that replaces it."""


class _Reader(pickle.Unpickler):
    def __init__(self, content: bytes, path: Path) -> None:
        super().__init__(io.BytesIO(content))
        self.path = path

    def find_class(self, module: str, name: str) -> Any:
        full_name = f"{'builtins' if module == '__builtin__' else module}.{name}"
        if full_name not in ADMITTED:
            raise names_code(self.path, full_name)
        return ADMITTED[full_name]


class _Part(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self.file, self.start, self.length, self.position = file, start, length, 0

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.position = (0, self.position, self.length)[whence] + offset
        return self.position

    def readinto(self, buffer: Any) -> int:
        self.file.seek(self.start + self.position)
        rest = max(0, self.length - self.position)
        count: int = self.file.readinto(memoryview(buffer)[:rest])  # type: ignore[attr-defined]
        self.position += count
        return count


def _load(path: Path, start: int, length: int) -> Any:
    with untrusted_files.opened(path) as file:
        return TORCH_READER.submit(saved_files.restricted, _Part(file, start, length), path).result()


def read(folder: Path) -> dict[Keys, Stored]:
    """All tensors of a folder by the keys of the nested state dict. Pickled values, such as rates, are skipped."""
    tensors: dict[Keys, Stored] = {}
    with _listing(folder) as (entries, items):
        for keys, (name, entry) in entries.items():
            if isinstance(entry, _Bytes):
                continue
            boxes = []
            for chunk in entry.state["chunks"]:
                offsets, sizes = _size(chunk.state["offsets"]), _size(chunk.state["sizes"])
                if (item := items.get((name, offsets))) is None:
                    raise ValueError("a chunk without a place")
                boxes.append(Box(item[0], offsets, sizes, partial(_load, *item)))
            dtype = torch_dtype(DTYPES[entry.state["properties"].state[0]])
            tensors[keys] = assembled(name, _size(entry.state["size"]), dtype, boxes)
    return tensors


def listed(folder: Path, needed: Callable[[Keys], bool]) -> dict[Keys, Any]:
    """The keys of each entry of a folder, with its value if it is pickled and `needed` accepts the keys, else None."""
    with _listing(folder) as (entries, items):
        return {
            keys: _load(*items[name, None]) if needed(keys) and (name, None) in items else None
            for keys, (name, _) in entries.items()
        }


def unpickled(content: bytes | None, path: Path) -> Any:
    """The content of a `.metadata` file, as inert values.

    Raises:
        UserError: it is missing or damaged, or names other types than DCP's.
    """
    if content is None:
        raise broken(path, "is missing")
    try:
        metadata = _Reader(content, path).load()
    except ERRORS as error:
        raise broken(path, f"is damaged: {type(error).__name__} in its pickle") from error
    if not isinstance(metadata, Inert) or not isinstance(metadata.state, dict):
        raise broken(path, "is damaged: it lists no tensors")
    return metadata


@contextlib.contextmanager
def _listing(folder: Path) -> Iterator[tuple[dict[Keys, tuple[str, Any]], dict[tuple[str, Any], Item]]]:
    """Yields names and entries of `.metadata` by their keys, and the places of all chunks.

    An error inside is raised as damage.
    """
    path = folder / file_names.DCP_METADATA
    state = unpickled(untrusted_files.read_bytes(path), path).state
    try:
        nested = state.get("planner_data") or {}
        listed = state["state_dict_metadata"].items()
        entries = {_path(nested.get(name) or (name,)): (name, entry) for name, entry in listed}
        yield entries, _items(folder, state["storage_data"])
    except ERRORS as error:
        raise broken(path, f"is damaged: {type(error).__name__} in its list of tensors") from error


def _items(folder: Path, listed: Mapping[Inert, Inert]) -> dict[tuple[str, Any], Item]:
    """The place of each chunk by name and offset; all files must be plain files of the folder."""
    items: dict[tuple[str, Any], Item] = {}
    sizes: dict[str, int] = {}
    for index, place in listed.items():
        name = place.state["relative_path"]
        path = untrusted_files.inside(folder, name, file_names.DCP_METADATA)
        if name not in sizes:
            try:
                with untrusted_files.opened(path) as file:
                    sizes[name] = file.seek(0, io.SEEK_END)
            except FileNotFoundError as error:
                raise broken(path, "is missing") from error
        start, length = place.state["offset"], place.state["length"]
        if start + length > sizes[name]:
            raise broken(path, f"is cut short: {sizes[name]} bytes, {start + length} expected")
        offset = index.state.get("offset")
        items[index.state["fqn"], None if offset is None else _size(offset)] = (path, start, length)
    return items


def _size(size: Inert) -> tuple[int, ...]:
    numbers = tuple(size.args[0]) if size.args else ()
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError("a tensor of impossible shape")
    return numbers


def _path(keys: Any) -> Keys:
    if not isinstance(keys, (tuple, list)) or not all(isinstance(key, (str, int)) for key in keys):
        raise TypeError("a path with a part that is not a key")
    return tuple(map(str, keys))
