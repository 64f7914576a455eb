"""Reads the headers of safetensors files, as strictly as the safetensors library: the bytes of each tensor."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from accel_fsdp import untrusted_files
from accel_fsdp.checkpoints.tensor_storage import ITEM_BYTES
from accel_fsdp.errors import UserError

LENGTH_BYTES = 8
LARGEST_HEADER = 100_000_000  # the format's own limit
BITS = {name: 8 * size for name, size in ITEM_BYTES.items()} | {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
"""Per element, of all dtypes that the format knows."""
METADATA, PARTS = "__metadata__", "DCP_SHARDING_INFO"
FIELDS = {"dtype", "shape", "data_offsets"}
LARGEST_SIZE = 1 << 64
MOST_DIMENSIONS = 64
"""torch's own limit; the format has none, and sizes of a million take minutes to multiply."""


@dataclass(frozen=True)
class Tensor:
    """One tensor in a safetensors file: dtype as the format spells it (BF16), and its bytes' place in the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file by name. Together they fill it, without holes and overlaps."""
    return read_parts(path)[0]


def read_parts(path: Path) -> tuple[dict[str, Tensor], dict[str, tuple[int, ...]]]:
    """Like `read`, with each part's offset in its tensor if a rank wrote the file (HuggingFaceStorageWriter)."""
    try:
        with untrusted_files.opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if size < LENGTH_BYTES or length > min(LARGEST_HEADER, size - LENGTH_BYTES):
                raise _damaged(path, "cut short, or no safetensors file")
            header = untrusted_files.mapping(file.read(length), path, strict=True)
    except FileNotFoundError:
        raise _damaged(path, "missing") from None
    except OSError as error:
        raise untrusted_files.unreadable(path, error.strerror or str(error)) from error
    notes = header.pop(METADATA, None)
    notes = {} if notes is None else notes
    if not (isinstance(notes, dict) and all(isinstance(note, str) for note in notes.values())):
        raise _damaged(path, f"its {METADATA} is not a mapping of text")
    begin = LENGTH_BYTES + length
    tensors = {name: _tensor(path, name, entry, begin) for name, entry in header.items()}
    _check_filled(path, tensors, begin, size)
    return tensors, _places(path, tensors, notes.get(PARTS))


def _places(path: Path, tensors: Mapping[str, Tensor], metadata: str | None) -> dict[str, tuple[int, ...]]:
    if metadata is None:
        return {}
    listed = untrusted_files.mapping(metadata.encode(), path)
    places: dict[str, tuple[int, ...]] = {}
    for name, part in listed.items():
        saved = part.get("saved_offsets") if isinstance(part, dict) else None
        if name not in tensors or not isinstance(saved, list) or len(saved) != len(tensors[name].shape):
            raise _damaged(path, f"the offsets of a part of {name} are missing")
        places[name] = _sizes(path, name, saved)
    return places


def _damaged(path: Path, what: str) -> UserError:
    return UserError(
        f"{path} is {what}" if what == "missing" else f"{path} is damaged: {what}",
        why="its tensors would differ from the written ones",
        fix="copy that file again from where it was written",
    )


def _tensor(path: Path, name: str, entry: Any, begin: int) -> Tensor:
    if not isinstance(entry, dict) or entry.keys() != FIELDS or not isinstance(entry["dtype"], str):
        raise _damaged(path, f"the dtype, shape or offsets of {name} are missing")
    if entry["dtype"] not in BITS:
        raise _damaged(path, f"{name} is of dtype {entry['dtype']}, which the format doesn't know")
    shape, offsets = _sizes(path, name, entry["shape"]), _sizes(path, name, entry["data_offsets"])
    bits = _product(path, name, (*shape, BITS[entry["dtype"]]))
    if len(offsets) != 2 or bits % 8 or offsets[1] - offsets[0] != bits // 8:
        raise _damaged(path, f"{name} has a size that differs from its shape and dtype")
    return Tensor(path, entry["dtype"], shape, begin + offsets[0], begin + offsets[1])


def _sizes(path: Path, name: str, numbers: Any) -> tuple[int, ...]:
    is_list = isinstance(numbers, list) and len(numbers) <= MOST_DIMENSIONS
    valid = is_list and all(type(number) is int and 0 <= number < LARGEST_SIZE for number in numbers)
    if not valid:
        raise _damaged(path, f"{name} has impossible sizes")
    return tuple(numbers)


def _product(path: Path, name: str, factors: tuple[int, ...]) -> int:
    if any(prod(factors[:count]) >= LARGEST_SIZE for count in range(len(factors) + 1)):
        raise _damaged(path, f"{name} has impossible sizes")
    return prod(factors)


def _check_filled(path: Path, tensors: Mapping[str, Tensor], begin: int, size: int) -> None:
    ordered = sorted(tensors.items(), key=lambda pair: (pair[1].start, pair[1].end))
    ends = [begin, *(tensor.end for _, tensor in ordered)]
    for (name, tensor), reached in zip(ordered, ends, strict=False):
        if tensor.start < reached:  # checked first, because tensors that overlap also seem to leave gaps
            raise _damaged(path, f"{name} overlaps another tensor")
    for (name, tensor), reached in zip(ordered, ends, strict=False):
        if tensor.start != reached:
            raise _damaged(path, f"{name} does not begin where the tensor before it ends")
    if size != ends[-1]:
        raise _damaged(path, f"it has {size:,} bytes, its tensors end at {ends[-1]:,}")
