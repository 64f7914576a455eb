"""Writes a single file for `torch.load`: torch writes it without the tensors' bytes, which are then filled in."""

import zlib
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from accel_fsdp.checkpoints import GAP_BYTES, Archive, FileReader, View, safetensors_header, torch_zip
from accel_fsdp.exporter.safetensors_writer import Output, TensorPlacement, torch_dtype
from accel_fsdp.file_positions import write_at

DESCRIPTOR = b"PK\x07\x08"
DESCRIPTOR_CRC = 4


def place(content: Any, path: Path, more: Mapping[tuple[str, str], Any] | None = None) -> list[TensorPlacement]:
    """Writes the file with room for all tensors, and returns the offset of each.

    `content` is what `torch.load` will return, with an `Output` in the place of each tensor. `more`: names in its
    pickle besides those of tensors.

    Raises:
        OSError: the folder can't be written.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(_blank(content), path)
    with closing(FileReader()) as reader:
        loaded = torch_zip.load(reader, path, dict(more or {}))
    return [TensorPlacement(output, path, _header_entry(path, view).start) for output, view in _pairs(content, loaded)]


def _blank(content: Any) -> Any:
    import torch

    if isinstance(content, Output):
        return torch.empty(content.source.shape, dtype=torch_dtype(content.dtype))
    if type(content) is dict:
        return {key: _blank(value) for key, value in content.items()}
    return [_blank(value) for value in content] if type(content) is list else content


def _pairs(content: Any, loaded: Any) -> Iterator[tuple[Output, View]]:
    if isinstance(content, Output):
        yield content, loaded
    elif type(content) is dict:
        for key, value in content.items():
            yield from _pairs(value, loaded[key])
    elif type(content) is list:
        for value, stored in zip(content, loaded, strict=True):
            yield from _pairs(value, stored)


def tensors_in(path: Path) -> dict[str, safetensors_header.Tensor]:
    """The tensors of a file that holds a dict of them, with the places of their bytes."""
    with closing(FileReader()) as reader:
        content: dict[str, View] = torch_zip.load(reader, path)
    return {name: _header_entry(path, view) for name, view in content.items()}


def _header_entry(path: Path, view: View) -> safetensors_header.Tensor:
    piece = view.piece((0,) * len(view.shape))
    return safetensors_header.Tensor(
        path, view.dtype, view.shape, piece.record.start + piece.skip, piece.record.start + piece.record.length
    )


def seal(path: Path) -> None:
    """Writes the checksum of each tensor's bytes into its two headers, so that the file is a valid archive."""
    reader = FileReader()
    with path.open("r+b", buffering=0) as file:
        sealed = Archive(reader, path, 0, reader.size_of(path))
        for name, slot in sealed.slots.items():
            if not name.startswith("data/"):
                continue
            record = sealed.record(name)
            crc = _crc(reader, path, record.start, record.length).to_bytes(4, "little")
            write_at(file.fileno(), crc, slot.entry + torch_zip.CRC_AT)
            end = record.start + record.length
            if reader.bytes_of(path, end, 4) == DESCRIPTOR:
                write_at(file.fileno(), crc, end + DESCRIPTOR_CRC)
    reader.close()


def _crc(reader: FileReader, path: Path, start: int, length: int) -> int:
    total, buffer = 0, memoryview(bytearray(min(GAP_BYTES, length)))
    for at in range(0, length, GAP_BYTES):
        part = buffer[: min(GAP_BYTES, length - at)]
        reader.read_bytes(path, start + at, part)
        total = zlib.crc32(part, total)
    return total
