"""Writes tensors to safetensors files, one after another: cast, checked, hashed, written; then reopened and compared.

Memory holds one tensor. A hash is taken of the bytes that are written, and again of those that are read back.
"""

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import xxhash

from accel_fsdp.checkpoints import (
    ITEM_BYTES,
    Stored,
    bytes_of,
    file_names,
    safetensors_files,
    saved_files,
    short_name,
)
from accel_fsdp.errors import UserError
from accel_fsdp.untrusted_files import broken

BLOCK_ELEMENTS = 1 << 22
"""The elements that are cast and hashed at a time: they stay in the processor's cache."""
MOST_AHEAD_BYTES = 1 << 28
"""The largest tensor that is loaded while the one before it is written."""
READERS = 2
"""Threads that read the files back."""
SYNCED_BYTES = 1 << 28
"""The disk is given what was written after so many bytes, so that the last sync is short."""
LENGTH_BYTES = 8
Progress = Callable[[int], None]
"""Called with the number of bytes written."""


@dataclass(frozen=True)
class Output:
    """A tensor to write: its name and dtype in the file, and the source of its elements."""

    name: str
    dtype: torch.dtype
    source: Stored

    @property
    def size_bytes(self) -> int:
        return prod(self.source.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Written:
    """One tensor of an export, by the name of its dtype in safetensors. `hash`: XXH3-128 of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    file: str
    hash: str

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


def write(
    outputs: Sequence[Output], folder: Path, stem: str, max_shard_size: str | int, progress: Progress, sync: bool
) -> dict[str, Written]:
    """Divides tensors into files as `save_pretrained` does, and writes files and index.

    Raises:
        OSError: the folder can't be written.
        UserError: a source can't be read, or its numbers don't fit the dtype.
    """
    from huggingface_hub import split_state_dict_into_shards_factory

    by_name = {output.name: output for output in outputs}
    split = split_state_dict_into_shards_factory(
        by_name,
        get_storage_size=lambda output: output.size_bytes,
        filename_pattern=f"{stem}{{suffix}}{file_names.SAFETENSORS}",
        max_shard_size=max_shard_size,
    )
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / f"{stem}{file_names.INDEX_END}").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    written: dict[str, Written] = {}
    for file, names in split.filename_to_tensors.items():
        written |= _write_file(folder / file, [by_name[name] for name in names], progress, sync)
    return written


def _write_file(path: Path, outputs: list[Output], progress: Progress, sync: bool) -> dict[str, Written]:
    """Writes one file, the widest dtypes first so that every tensor is aligned."""
    ordered = sorted(outputs, key=lambda output: -output.dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for output in ordered:
        end = offset + output.size_bytes
        dtype, shape = short_name(output.dtype, output.name), list(output.source.shape)
        header[output.name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    unsynced = 0
    digests = {output.name: xxhash.xxh3_128() for output in ordered}
    with path.open("xb", buffering=0) as file:
        _put(file, len(text).to_bytes(LENGTH_BYTES, "little") + text)
        for output, part in _parts(ordered):
            for block in blocks(output, part):
                digests[output.name].update(block)
                _put(file, block)
                progress(len(block))
                unsynced += len(block)
                if sync and unsynced >= SYNCED_BYTES:
                    os.fsync(file.fileno())
                    unsynced = 0
        if sync:
            os.fsync(file.fileno())
    return {
        output.name: Written(short_name(output.dtype), output.source.shape, path.name, digests[output.name].hexdigest())
        for output in ordered
    }


def _parts(outputs: Sequence[Output]) -> Iterator[tuple[Output, torch.Tensor]]:
    """All tensors in their order, in parts where their files have parts; each is loaded while the last is written."""
    loads = [(output, load) for output in outputs for load in output.source.in_parts or (output.source.load,)]
    with ThreadPoolExecutor(1) as pool:
        following: Future[torch.Tensor] | None = None
        for number, (output, load) in enumerate(loads):
            part = following.result() if following else load()
            is_next_small = number + 1 < len(loads) and loads[number + 1][0].size_bytes <= MOST_AHEAD_BYTES
            following = pool.submit(loads[number + 1][1]) if is_next_small else None
            yield output, part


def _put(file: Any, content: bytes | memoryview) -> None:
    """Writes all of it: a write to a disk that is nearly full may be short."""
    rest = memoryview(content)
    while rest:
        rest = rest[file.write(rest) :]


def blocks(output: Output, tensor: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a part of a tensor in its dtype in the file.

    Raises:
        UserError: it holds numbers that the dtype can't hold.
    """
    if output.dtype == tensor.dtype:
        whole = _bytes(bytes_of(tensor))
        step = BLOCK_ELEMENTS * tensor.element_size()
        yield from (whole[start : start + step] for start in range(0, len(whole), step))
        return
    for part in _blocks_of(tensor):
        converted = part.to(output.dtype)
        if output.dtype.is_floating_point and count_non_finite(converted) > count_non_finite(part):
            raise UserError(
                f"{output.name} holds numbers beyond {torch.finfo(output.dtype).max:g}, the largest of "
                f"{str(output.dtype).removeprefix('torch.')}",
                why="they would be infinite in the export",
                fix="--dtype float32; if that is it, take an older checkpoint: models compute in float32",
            )
        yield _bytes(converted)


def _blocks_of(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    return torch.split(tensor.detach().contiguous().reshape(-1), BLOCK_ELEMENTS) if tensor.numel() else ()


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).numpy().data)


def count_non_finite(numbers: torch.Tensor) -> int:
    """The count of NaN and infinite numbers: a run that has diverged leaves such weights."""
    if numbers.is_complex():
        numbers = torch.view_as_real(numbers)
    if not numbers.is_floating_point():
        return 0
    if numbers.element_size() == 1:
        numbers = numbers.float()
    if not numbers.numel() or all(math.isfinite(end) for end in numbers.aminmax()):  # NaN are passed on
        return 0
    return int((~numbers.isfinite()).sum())


def reread(folder: Path, written: Mapping[str, Written], progress: Progress) -> dict[str, int]:
    """Reopens all files: names, shapes, dtypes and hashes must be those that were written; hashes may be empty.

    Returns:
        The count of NaN or infinite numbers, for the tensors that hold any.
    """
    paths = [path for path in sorted(folder.iterdir()) if path.suffix in file_names.EXPORTED]
    files = {entry.file for entry in written.values()}
    if unknown := next((path.name for path in paths if path.name not in files), ""):
        raise broken(folder, f"holds {unknown}, which was not exported")  # even an empty file may be loaded as weights
    in_files = {path.name: tensors_in(path) for path in paths}

    def check(name: str) -> int:
        entry, stored = written[name], in_files.get(written[name].file, {}).pop(name, None)
        if stored is None or (short_name(stored.dtype), stored.shape) != (entry.dtype, entry.shape):
            raise broken(folder / entry.file, f"doesn't hold {name} as {entry.dtype} {list(entry.shape)}")
        digest, tensor, count = xxhash.xxh3_128(), stored.load(), 0
        for part in _blocks_of(tensor):
            digest.update(_bytes(part))
            count += count_non_finite(part)
            progress(part.nbytes)
        if entry.hash not in ("", digest.hexdigest()):
            raise broken(folder / entry.file, f"is damaged: {name} was changed after the export")
        return count

    with ThreadPoolExecutor(READERS) as pool:
        counts = pool.map(check, written)
        non_finite = {name: count for name, count in zip(written, counts, strict=True) if count}
    if extra := [name for tensors in in_files.values() for name in tensors]:
        raise broken(folder, f"holds {extra[0]}, which was not exported")
    return dict(sorted(non_finite.items()))


def tensors_in(path: Path) -> dict[str, Stored]:
    """The tensors of an exported file."""
    if path.suffix == file_names.SAFETENSORS:
        return safetensors_files.of_file(path)
    return {keys[-1]: stored for keys, stored in saved_files.tensors(path).items()}


def as_pth(folder: Path, written: Mapping[str, Written], sync: bool) -> dict[str, Written]:
    """Replaces the files by one for `torch.load`, which torch writes from the mapped tensors."""
    places = {entry.file: safetensors_files.of_file(folder / entry.file) for entry in written.values()}
    path = folder / file_names.TORCH_MODEL
    with path.open("xb") as file:
        torch.save({name: places[entry.file][name].load() for name, entry in written.items()}, file)
        if sync:
            os.fsync(file.fileno())
    for name in (*places, *(index.name for index in folder.glob(f"*{file_names.INDEX_END}"))):
        with contextlib.suppress(FileNotFoundError):
            (folder / name).unlink()
    return {name: Written(entry.dtype, entry.shape, path.name, entry.hash) for name, entry in written.items()}
