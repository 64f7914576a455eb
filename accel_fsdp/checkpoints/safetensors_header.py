"""Reads the headers of safetensors files without torch: names, dtypes, shapes, and the bytes of each tensor."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from accel_fsdp import untrusted_files
from accel_fsdp.errors import UserError

ITEM_BYTES = {
    **{"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2},
    **{"U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "C64": 8},
    **{"F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1},
}
"""Bytes per element, by the name of the dtype in headers."""
TORCH_NAMES = {
    **{"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32"},
    **{"I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn"},
    **{"F8_E5M2": "float8_e5m2", "C64": "complex64", "U64": "uint64", "U32": "uint32", "U16": "uint16"},
    **{"F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz"},
}
"""torch's names of the same dtypes."""
DTYPES = {name: short for short, name in TORCH_NAMES.items()}
LENGTH_BYTES = 8
BITS = {name: 8 * size for name, size in ITEM_BYTES.items()} | {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
METADATA = "__metadata__"


@dataclass(frozen=True)
class Tensor:
    """One tensor in a safetensors file: dtype as the format spells it (BF16), and its bytes' place in the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file by name. Together they fill it.

    Raises:
        UserError: the file is missing, cut short or no safetensors file.
    """
    try:
        with untrusted_files.opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if length > size - LENGTH_BYTES:
                raise damaged(path, "cut short, or no safetensors file")
            header = untrusted_files.mapping(file.read(length), path)
    except FileNotFoundError:
        raise damaged(path, "missing") from None
    except OSError as error:
        raise untrusted_files.unreadable(path, error.strerror or str(error)) from error
    header.pop(METADATA, None)
    begin = LENGTH_BYTES + length
    tensors = {name: _tensor(path, name, entry, begin) for name, entry in header.items()}
    _check_filled(path, tensors, begin, size)
    return tensors


def damaged(path: Path, what: str) -> UserError:
    return UserError(
        f"{path} is {what}" if what == "missing" else f"{path} is damaged: {what}",
        why="its tensors would differ from the written ones",
        fix="copy that file again from where it was written",
    )


def _tensor(path: Path, name: str, entry: Any, begin: int) -> Tensor:
    try:
        shape, (start, end) = tuple(map(int, entry["shape"])), map(int, entry["data_offsets"])
        if (end - start) * 8 != prod(shape) * BITS[entry["dtype"]] or start < 0:
            raise ValueError("a size that differs from its shape and dtype")
        return Tensor(path, entry["dtype"], shape, begin + start, begin + end)
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(path, f"the dtype, shape or offsets of {name} are wrong ({error})") from error


def _check_filled(path: Path, tensors: Mapping[str, Tensor], begin: int, size: int) -> None:
    reached = begin
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.start, tensor.end)):
        if tensor.start != reached:
            raise damaged(path, f"two of its tensors overlap, or leave a gap at byte {reached:,}")
        reached = tensor.end
    if size != reached:
        raise damaged(path, f"it has {size:,} bytes, its tensors end at {reached:,}")
