"""Distributed checkpoints of torch (DCP): `.metadata` and `.distcp` files, read without torch.

`.metadata` is a pickle, and loading it the usual way runs the code that it names. The unpickler here admits only the
types of DCP's metadata, and turns them into inert values.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from accel_fsdp import untrusted_files
from accel_fsdp.checkpoints import file_names, torch_zip
from accel_fsdp.checkpoints.safe_unpickle import ERRORS, SPARE_FOR_ONE_TENSOR, Inert, unpickle
from accel_fsdp.checkpoints.tensor_storage import FileReader, FileRecord, Stored, damaged, tensor
from accel_fsdp.checkpoints.torch_zip import DTYPES, TENSORS, Archive, Storage, View
from accel_fsdp.errors import UserError

DATA = "data/0"
"""The record of an archive's first tensor."""
CRC_BYTES = 4
LARGEST_METADATA = 1 << 28


class _Bytes(Inert):
    pass


class _Format(Inert):
    pass


def _member(kind: Any, name: Any) -> str:
    if kind is not _Format:
        raise ValueError("getattr of something else")
    return str(name)


PATHS = ("Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
DCP, FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
ADMITTED: dict[tuple[str, str], Any] = {
    (DCP, "Metadata"): Inert,
    (DCP, "TensorStorageMetadata"): Inert,
    (DCP, "BytesStorageMetadata"): _Bytes,
    (DCP, "TensorProperties"): Inert,
    (DCP, "ChunkStorageMetadata"): Inert,
    (DCP, "MetadataIndex"): Inert,
    (DCP, "StorageMeta"): Inert,
    (DCP, "_MEM_FORMAT_ENCODING"): _Format,
    (FILES, "_StorageInfo"): Inert,
    ("builtins", "getattr"): _member,
    ("torch", "Size"): torch_zip.size,
    ("torch.serialization", "_get_layout"): Inert,
    **{(module, name): Inert for module in ("pathlib", "pathlib._local") for name in PATHS},
    **{("torch", name): short for name, short in DTYPES.items()},
}
"""The names that a `.metadata` file may contain, each with the inert value that replaces it."""


@dataclass(frozen=True)
class _Item:
    path: Path
    start: int
    length: int


@dataclass(frozen=True)
class Entry:
    """A tensor as `.metadata` lists it: its key in the nested state dict, and its chunks with their offsets."""

    path: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[tuple[tuple[int, ...], View], ...]

    def stored(self, name: str) -> Stored:
        return tensor(name, self.dtype, self.shape, [view.piece(offsets) for offsets, view in self.chunks])


def read(folder: Path, reader: FileReader) -> dict[tuple[str, ...], Stored]:
    """Finds all tensors of a folder by path, the keys of the nested state dict, without reading any."""
    return {entry.path: entry.stored(name) for name, entry in entries(folder, reader).items()}


def entries(folder: Path, reader: FileReader) -> dict[str, Entry]:
    """The tensors that a folder lists, by their flat names, each with its chunks, without reading any.

    Pickled values, such as learning rates, are skipped.
    """
    with _listing(folder) as metadata:
        chunks, items = _Chunks(reader), _items(folder, reader, metadata["storage_data"])
        paths = metadata.get("planner_data") or {}
        return {
            _text(name): _entry(name, _path(paths.get(name) or (name,)), entry.state, items, chunks)
            for name, entry in metadata["state_dict_metadata"].items()
            if not isinstance(entry, _Bytes)
        }


def listed(folder: Path, reader: FileReader, needed: Callable[[tuple[str, ...]], bool]) -> dict[tuple[str, ...], Any]:
    """The path of each entry of a folder, with its value if it is pickled and `needed` accepts the path, else None."""
    with _listing(folder) as metadata:
        items, nested = _items(folder, reader, metadata["storage_data"]), metadata.get("planner_data") or {}
        paths = {_text(name): _path(nested.get(name) or (name,)) for name in metadata["state_dict_metadata"]}
        places = {path: items[name, None] for name, path in paths.items() if needed(path) and (name, None) in items}
        values = {path: Archive(reader, at.path, at.start, at.length).load(TENSORS) for path, at in places.items()}
        return {path: values.get(path) for path in paths.values()}


def read_bytes(path: Path) -> bytes:
    content = untrusted_files.read_bytes(path, LARGEST_METADATA)
    if content is None:
        raise damaged(path, "is missing")
    return content


def unpickled(content: bytes, path: Path) -> Any:
    """The content of a `.metadata` file, as inert values; raises UserError if it names other types than DCP's."""
    metadata = unpickle(content, ADMITTED, path)
    if not isinstance(metadata, Inert) or not isinstance(metadata.state, dict):
        raise damaged(path, "is damaged: it lists no tensors")
    return metadata


@contextlib.contextmanager
def _listing(folder: Path) -> Iterator[dict[str, Any]]:
    """Yields the content of `.metadata`; an error inside the block is raised as damage."""
    path = folder / file_names.DCP_METADATA
    metadata = unpickled(read_bytes(path), path)
    try:
        yield metadata.state
    except ERRORS as error:
        raise damaged(path, f"is damaged: {type(error).__name__} in its list of tensors") from error


class _Chunks:
    """Describes the content of chunks, each of which is an archive of one tensor.

    Most of the thousands of chunks have the same length and the same bytes, except for their numbers. Of each kind the
    first chunk is parsed; the others differ from it only in the checksum.
    """

    def __init__(self, reader: FileReader) -> None:
        self.reader = reader
        self._kinds: dict[tuple[int, tuple[int, ...]], tuple[bytes, int, View]] = {}

    def view(self, item: _Item, sizes: tuple[int, ...]) -> Any:
        """The tensor at the item's place, which must have these sizes."""
        if kind := self._kinds.get((item.length, sizes)):
            head, entry, first = kind
            crc = self.reader.bytes_of(item.path, item.start + entry + torch_zip.CRC_AT, CRC_BYTES)
            if crc != bytes(CRC_BYTES) and self.reader.bytes_of(item.path, item.start, len(head)) == head:
                length = first.storage.record.length
                record = FileRecord(item.path, item.start + len(head), length, int.from_bytes(crc, "little"))
                return View(Storage(first.dtype, record), first.dtype, first.offset, first.shape, first.strides)
        return self._parsed(item, sizes)

    def _parsed(self, item: _Item, sizes: tuple[int, ...]) -> Any:
        opened = Archive(self.reader, item.path, item.start, item.length)
        view = opened.load(TENSORS, SPARE_FOR_ONE_TENSOR)
        if isinstance(view, View) and view.storage.dtype == view.dtype and DATA in opened.slots:
            record = opened.record(DATA)
            head = opened.head[: record.start - item.start]
            if view.storage.record == record and record.crc and item.start + len(head) == record.start:
                self._kinds[item.length, sizes] = head, opened.slots[DATA].entry, view
        return view


def _text(name: Any) -> str:
    if not isinstance(name, str):
        raise TypeError(f"a name of type {type(name).__name__}")
    return name


def _path(keys: Any) -> tuple[str, ...]:
    if not isinstance(keys, (tuple, list)) or not all(isinstance(key, (str, int)) for key in keys):
        raise TypeError("a path with a part that is not a key")
    return tuple(map(str, keys))


def _items(folder: Path, reader: FileReader, listed: dict[Inert, Inert]) -> dict[tuple[str, Any], _Item]:
    """The location of each chunk by name and offset; all files must be plain files of the folder."""
    items: dict[tuple[str, Any], _Item] = {}
    places: dict[str, tuple[Path, int]] = {}
    for index, place in listed.items():
        name = _text(place.state["relative_path"])
        at, length = torch_zip.size((place.state["offset"], place.state["length"]))
        if name not in places:
            inner = untrusted_files.inside(folder, name, file_names.DCP_METADATA)
            places[name] = inner, reader.size_of(inner)
        path, size_bytes = places[name]
        if place.state.get("transform_descriptors"):
            raise UserError(
                f"{path} is compressed by an extension of DCP",
                why="its tensors can't be read in parts",
                fix="save without extensions, or load it with torch and save it again",
            )
        if at + length > size_bytes:
            raise damaged(path, f"is cut short: {size_bytes} bytes, {at + length} expected")
        offset = index.state.get("offset")
        items[_text(index.state["fqn"]), None if offset is None else torch_zip.size(offset)] = _Item(path, at, length)
    _check_apart(folder, items.values())
    return items


def _check_apart(folder: Path, items: Collection[_Item]) -> None:
    """Refuses chunks that overlap: reading them would take longer than the files' sizes warrant."""
    places = sorted((str(item.path), item.start, item.length) for item in items)
    for (file, start, length), (following, next_start, _) in pairwise(places):
        if file == following and next_start < start + length:
            raise damaged(folder / file_names.DCP_METADATA, f"is damaged: it lists byte {next_start} of {file} twice")


def _entry(
    name: str, path: tuple[str, ...], entry: dict[str, Any], items: dict[tuple[str, Any], _Item], chunks: _Chunks
) -> Entry:
    dtype, shape = entry["properties"].state[0], torch_zip.size(entry["size"])
    views: list[tuple[tuple[int, ...], View]] = []
    for chunk in entry["chunks"]:
        offsets, sizes = torch_zip.size(chunk.state["offsets"]), torch_zip.size(chunk.state["sizes"])
        item = items.get((name, offsets))
        if item is None:
            raise ValueError("a chunk without a place")
        view = chunks.view(item, sizes)
        if not isinstance(view, View) or view.dtype != dtype or view.shape != sizes:
            raise damaged(item.path, f"differs from the description of {name} in {file_names.DCP_METADATA}")
        views.append((offsets, view))
    return Entry(path, dtype, shape, tuple(views))
