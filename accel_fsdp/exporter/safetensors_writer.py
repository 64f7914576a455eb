"""Writes tensors to safetensors files block by block, in several threads; memory holds only the blocks in flight.

Every tensor's offset is known beforehand, so that each block is written straight to its offset, and a tensor may be
larger than memory. A block is hashed when it is written and again when the file is reopened.
"""

import contextlib
import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_fsdp.checkpoints import FLOATS, ITEM_BYTES, TORCH_NAMES, FileReader, Source, file_names, part_of
from accel_fsdp.errors import UserError
from accel_fsdp.file_positions import write_at

if TYPE_CHECKING:
    import torch

BLOCK_ELEMENTS = 1 << 22
QUEUED = 1 << 12
"""Blocks that wait for a thread: each takes a kilobyte or two, and the largest models have a hundred thousand."""
THREADS = min(4, (os.cpu_count() or 1) + 1)
CACHED_ELEMENTS = 1 << 15
NOT_FINITE = {
    **{"F64": ("<u8", 0x7FF0000000000000), "F32": ("<u4", 0x7F800000), "C64": ("<u4", 0x7F800000)},
    **{"F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80), "F8_E5M2": ("u1", 0x7C), "F8_E4M3": ("u1", 0x7F)},
}
"""The bits of a number of each dtype, and those that are all set in NaN and infinity."""
INFINITY, QUIET = 0x7F800000, 0x40
"""float32's infinity, and the bit that keeps the upper half of a NaN a NaN."""
SYNC_SECONDS = 0.2
LARGEST = {"F16": "65504, the largest of float16", "BF16": "3.389e38, the largest of bfloat16"}
LARGEST["F32"] = "3.402e38, the largest of float32"
NARROWER = {"F16": ("BF16", "F32", "F64"), "BF16": ("F32", "F64"), "F32": ("F64",)}
"""For each dtype, the wider dtypes whose largest numbers become infinite in it."""
WIDER = {
    "F16": "--dtype bfloat16 or --dtype float32",
    "BF16": "--dtype float32",
    "F32": "take an older checkpoint: models compute in float32",
}
LENGTH_BYTES = 8
Progress = Callable[[int], None]
"""Called with the number of bytes written."""


def torch_dtype(dtype: str) -> "torch.dtype":
    import torch

    dtype_class: torch.dtype = getattr(torch, TORCH_NAMES[dtype])
    return dtype_class


def whole(reader: FileReader, source: Source) -> "torch.Tensor":
    import torch

    content = part_of(reader, source, 0, prod(source.shape))
    if not content:
        return torch.empty(source.shape, dtype=torch_dtype(source.dtype))
    return torch.frombuffer(content, dtype=torch_dtype(source.dtype)).view(source.shape)


@dataclass(frozen=True)
class Output:
    """A tensor to write: its name and dtype in the file, and the source of its elements."""

    name: str
    dtype: str
    source: Source

    @property
    def size_bytes(self) -> int:
        return prod(self.source.shape) * ITEM_BYTES[self.dtype]

    @property
    def block(self) -> int:
        """Elements per block: a multiple of the source's `unit`."""
        return max(1, BLOCK_ELEMENTS // self.source.unit) * self.source.unit


@dataclass(frozen=True)
class TensorPlacement:
    """Where a tensor's bytes begin in a file."""

    output: Output
    path: Path
    start: int


def cast_to(dtype: str, target: str | None) -> str:
    """The dtype in the file: `target` for floating-point numbers, unchanged for others."""
    return target if target is not None and dtype in FLOATS else dtype


def place(outputs: Sequence[Output], folder: Path, stem: str, max_shard_size: str | int) -> list[TensorPlacement]:
    """Divides tensors into files as `save_pretrained` does, writes headers and index, and returns the offsets.

    Raises:
        OSError: the folder can't be written.
    """
    from huggingface_hub import split_state_dict_into_shards_factory

    split = split_state_dict_into_shards_factory(
        {output.name: output for output in outputs},
        get_storage_size=lambda output: output.size_bytes,
        filename_pattern=f"{stem}{{suffix}}{file_names.SAFETENSORS}",
        max_shard_size=max_shard_size,
    )
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / f"{stem}{file_names.INDEX_END}").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    by_name = {output.name: output for output in outputs}
    placements: list[TensorPlacement] = []
    for file, names in split.filename_to_tensors.items():
        placements += _with_header(folder / file, [by_name[name] for name in names])
    return placements


def _with_header(path: Path, outputs: list[Output]) -> list[TensorPlacement]:
    """Writes one file's header, the widest dtypes first so that every tensor is aligned."""
    ordered = sorted(outputs, key=lambda output: -ITEM_BYTES[output.dtype])
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for output in ordered:
        header[output.name] = {
            "dtype": output.dtype,
            "shape": list(output.source.shape),
            "data_offsets": [offset, offset + output.size_bytes],
        }
        offset += output.size_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
        file.truncate(LENGTH_BYTES + len(text) + offset)
    begin = LENGTH_BYTES + len(text)
    return [TensorPlacement(output, path, begin + header[output.name]["data_offsets"][0]) for output in ordered]


class Buffers(threading.local):
    """One buffer per thread, as large as the largest block so far."""

    content = bytearray()

    def take(self, size_bytes: int) -> memoryview:
        """The first bytes of this thread's buffer."""
        if len(self.content) < size_bytes:
            self.content = bytearray(size_bytes)
        return memoryview(self.content)[:size_bytes]


def write(
    placed: Sequence[TensorPlacement],
    reader: FileReader,
    threads: int,
    progress: Progress,
    sync: bool,
) -> dict[str, str]:
    """Fills files whose headers `place` has written; returns the hash of each tensor by name.

    With `sync`, written data is flushed to the disk in the background, and completely at the end.

    Raises:
        OSError: the disk is full.
        UserError: a source can't be read.
    """
    paths = dict.fromkeys(placement.path for placement in placed)
    with contextlib.ExitStack() as stack:
        opened = {path: stack.enter_context(path.open("r+b", buffering=0)).fileno() for path in paths}
        if sync:
            stack.enter_context(_flushing(list(opened.values())))
        buffers = Buffers()

        def block(placement: TensorPlacement, start: int, stop: int) -> bytes:
            content = _block(placement.output, reader, buffers, start, stop)
            write_at(opened[placement.path], content, placement.start + start * ITEM_BYTES[placement.output.dtype])
            progress(len(content))
            return _hash(content)

        return _hashes(placed, block, threads)


def _block(output: Output, reader: FileReader, buffers: Buffers, start: int, stop: int) -> memoryview:
    source = output.source
    raw = buffers.take((stop - start) * ITEM_BYTES[source.dtype])
    source.read(reader, start, stop, raw)
    if source.dtype == output.dtype:
        return raw
    narrowed_block = cast(raw, source.dtype, output.dtype)
    narrowed = source.dtype in NARROWER.get(output.dtype, ())
    if (
        narrowed
        and (non_finite := count_non_finite(narrowed_block, output.dtype))
        and non_finite > count_non_finite(raw, source.dtype)
    ):
        raise _overflow_error(output.name, output.dtype)
    return narrowed_block


def count_non_finite(content: memoryview, dtype: str) -> int:
    """The count of NaN and infinite numbers: a run that has diverged leaves such weights."""
    import numpy as np

    if dtype not in NOT_FINITE:
        return 0
    kind, mask = NOT_FINITE[dtype]
    bits, non_finite = np.frombuffer(content, kind), 0
    for start in range(0, bits.size, CACHED_ELEMENTS):
        exponents = bits[start : start + CACHED_ELEMENTS] & bits.dtype.type(mask)
        if exponents.max() == mask:
            non_finite += int((exponents == mask).sum())
    return non_finite


def check_range(name: str, dtype: str, before: "torch.Tensor", after: "torch.Tensor") -> None:
    """Refuses finite numbers that became infinite in `after`, whose dtype is `dtype`."""
    if dtype not in LARGEST:
        return
    infinite = after.isinf()
    if bool(infinite.any()) and bool(before[infinite].isfinite().any()):
        raise _overflow_error(name, dtype)


def _overflow_error(name: str, dtype: str) -> UserError:
    return UserError(
        f"{name} holds numbers beyond {LARGEST[dtype]}",
        why="they would be infinite in the export",
        fix=WIDER[dtype],
    )


def cast(raw: memoryview, dtype: str, target: str) -> memoryview:
    """Elements in another dtype, rounded to nearest even as torch does."""
    if (dtype, target) == ("F32", "BF16"):
        return _bfloat16(raw)
    import torch

    elements = torch.frombuffer(raw, dtype=torch_dtype(dtype))
    converted = elements.to(torch_dtype(target))
    return memoryview(converted.view(torch.uint8).numpy().data)


def _bfloat16(raw: memoryview) -> memoryview:
    """The upper half of each float32, rounded, with NumPy: importing torch takes as long as writing two gigabytes."""
    import numpy as np

    bits = np.frombuffer(raw, "<u4")
    halves = np.empty(bits.size, "<u2")
    for start in range(0, bits.size, CACHED_ELEMENTS):
        part = bits[start : start + CACHED_ELEMENTS]
        upper = part >> 16
        rounded = (upper & 1) + 0x7FFF
        rounded += part
        rounded >>= 16
        not_numbers = (part & 0x7FFFFFFF) > INFINITY
        if not_numbers.any():
            rounded[not_numbers] = upper[not_numbers] | QUIET
        halves[start : start + CACHED_ELEMENTS] = rounded
    return memoryview(halves.view("u1").data)


def _hash(content: memoryview) -> bytes:
    import xxhash

    return xxhash.xxh3_128_digest(content)


def _hashes(
    placed: Sequence[TensorPlacement], block: Callable[[TensorPlacement, int, int], bytes], threads: int
) -> dict[str, str]:
    """Runs `block` for all blocks of all tensors, and joins the hashes of each tensor's blocks."""
    joined = {placement.output.name: b"" for placement in placed}
    blocks = list(_blocks(placed))
    with ThreadPoolExecutor(threads) as pool:
        try:
            for first in range(0, len(blocks), QUEUED):
                part = blocks[first : first + QUEUED]
                for (placement, *_), hashed in zip(part, pool.map(block, *zip(*part, strict=True)), strict=True):
                    joined[placement.output.name] += hashed
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return {name: _hash(memoryview(hashes)).hex() for name, hashes in joined.items()}


def _blocks(placed: Sequence[TensorPlacement]) -> Iterator[tuple[TensorPlacement, int, int]]:
    for placement in placed:
        count = prod(placement.output.source.shape)
        for start in range(0, count, placement.output.block):
            yield placement, start, min(start + placement.output.block, count)


@contextlib.contextmanager
def _flushing(descriptors: list[int]) -> Iterator[None]:
    """Flushes files in the background while the block runs, and all of it at its end."""
    stop = threading.Event()

    sync_data = getattr(os, "fdatasync", os.fsync)  # neither macOS nor Windows has it

    def flush() -> None:
        while not stop.wait(SYNC_SECONDS):
            for descriptor in descriptors:
                sync_data(descriptor)

    thread = threading.Thread(target=flush, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    for descriptor in descriptors:
        os.fsync(descriptor)


def reread(
    placed: Sequence[TensorPlacement], threads: int, progress: Progress
) -> tuple[dict[str, str], dict[str, int]]:
    """Reads all tensors back from their files; returns the hash of each, and its count of NaN or infinite numbers."""
    reader, buffers, non_finite, lock = FileReader(), Buffers(), Counter[str](), threading.Lock()

    def block(placement: TensorPlacement, start: int, stop: int) -> bytes:
        item = ITEM_BYTES[placement.output.dtype]
        content = buffers.take((stop - start) * item)
        reader.read_bytes(placement.path, placement.start + start * item, content)
        progress(len(content))
        if count := count_non_finite(content, placement.output.dtype):
            with lock:
                non_finite[placement.output.name] += count
        return _hash(content)

    try:
        return _hashes(placed, block, threads), dict(non_finite)
    finally:
        reader.close()
