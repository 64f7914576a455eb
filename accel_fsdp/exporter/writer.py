"""Writes tensors to safetensors files, one after another: cast, checked, hashed, written.

Memory holds one tensor. The hash of a file is taken of the bytes that are written.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash

from accel_fsdp.checkpoints import (
    Stored,
    file_names,
    flat,
    marker,
    safetensors_files,
    same_bytes,
    saved_files,
    short_name,
)
from accel_fsdp.errors import UserError
from accel_fsdp.exporter.exported_folder import Spec
from accel_fsdp.untrusted_files import broken

BLOCK_ELEMENTS = 1 << 22
"""The elements that are cast and hashed at a time: they stay in the processor's cache."""
MOST_AHEAD_BYTES = 1 << 28
"""The largest tensor that is loaded while the one before it is written."""
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
    def spec(self) -> Spec:
        return Spec(self.source.shape, short_name(self.dtype, self.name))


@dataclass(frozen=True)
class Written:
    """What was written: the tensors by name, the hash of each file, and the count of numbers that aren't finite."""

    tensors: dict[str, Spec]
    hashes: dict[str, str] = field(default_factory=dict)
    non_finite: dict[str, int] = field(default_factory=dict)


def write(outputs: Sequence[Output], folder: Path, stem: str, max_shard_size: str | int, progress: Progress) -> Written:
    """Divides tensors into files as `save_pretrained` does, and writes files and index.

    Raises:
        OSError: the folder can't be written.
        UserError: a source can't be read, or its numbers don't fit the dtype.
    """
    from huggingface_hub import split_state_dict_into_shards_factory

    for path in folder.glob(f"{stem}*{file_names.SAFETENSORS}*"):  # of a write that was stopped
        path.unlink()
    by_name = {output.name: output for output in outputs}
    split = split_state_dict_into_shards_factory(
        by_name,
        get_storage_size=lambda output: output.spec.size_bytes,
        filename_pattern=f"{stem}{{suffix}}{file_names.SAFETENSORS}",
        max_shard_size=max_shard_size,
    )
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / f"{stem}{file_names.INDEX_END}").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    written = Written({output.name: output.spec for output in outputs})
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a second one would spend the reader's core on waiting for work
    try:
        for file, names in split.filename_to_tensors.items():
            aligned = sorted((by_name[name] for name in names), key=lambda output: -output.dtype.itemsize)
            written.hashes[file] = _write_file(folder / file, aligned, written.non_finite, progress)
    finally:
        torch.set_num_threads(threads)
    return written


def _write_file(path: Path, outputs: Sequence[Output], non_finite: dict[str, int], progress: Progress) -> str:
    """Writes one file, and adds to `non_finite`; returns the file's hash."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset, digest = 0, xxhash.xxh3_128()
    for output in outputs:
        end = offset + output.spec.size_bytes
        header[output.name] = {"dtype": output.spec.dtype, "shape": output.source.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    with path.open("xb") as file:

        def put(content: bytes | memoryview) -> None:
            digest.update(content)
            file.write(content)

        put(len(text).to_bytes(LENGTH_BYTES, "little") + text)
        for output, tensor in _loaded(outputs):
            for block in blocks(tensor):
                numbers, count = _cast(block, output)
                if count:
                    non_finite[output.name] = non_finite.get(output.name, 0) + count
                put(numbers.view(torch.uint8).numpy().data)
                progress(numbers.nbytes)
    return digest.hexdigest()


def _loaded(outputs: Sequence[Output]) -> Iterator[tuple[Output, torch.Tensor]]:
    """All tensors in their order, in parts; a small one is loaded while the one before it is written."""
    parts = [(output, part) for output in outputs for part in output.source.parts or (output.source,)]
    with ThreadPoolExecutor(1) as pool:
        following: Future[torch.Tensor] | None = None
        for (output, part), (_, after) in zip(parts, [*parts[1:], (None, None)], strict=True):
            tensor = following.result() if following else part.load()
            is_small = after and after.size_bytes <= MOST_AHEAD_BYTES
            following = pool.submit(after.load) if after and is_small else None
            yield output, tensor


def blocks(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    return torch.split(flat(tensor), BLOCK_ELEMENTS)


def _cast(block: torch.Tensor, output: Output) -> tuple[torch.Tensor, int]:
    """A block in its dtype in the file, and how many of its numbers aren't finite.

    Raises:
        UserError: it holds numbers that the dtype can't hold.
    """
    converted = block.to(output.dtype)
    count = count_non_finite(converted)
    if count and output.dtype != block.dtype and count > count_non_finite(block):
        raise UserError(
            f"{output.name} holds numbers beyond {torch.finfo(output.dtype).max:g}, the largest of "
            f"{str(output.dtype).removeprefix('torch.')}",
            why="they would be infinite in the export",
            fix="--dtype float32; if that is it, take an older checkpoint: models compute in float32",
        )
    return converted, count


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


def tensors_in(folder: Path) -> dict[str, Stored]:
    """The tensors of an exported model or adapter."""
    of_files = [safetensors_files.of_file(path) for path in sorted(folder.glob(file_names.ALL_SAFETENSORS))]
    of_files += map(_of_pth, folder.glob(file_names.TORCH_MODEL))
    return {name: stored for of_file in of_files for name, stored in of_file.items()}


def _of_pth(path: Path) -> dict[str, Stored]:
    return {keys[-1]: stored for keys, stored in saved_files.tensors(path).items()}


def as_pth(folder: Path, written: Written) -> Written:
    """Replaces the files by one for `torch.load`, which torch writes from the mapped tensors."""
    tensors, path = tensors_in(folder), folder / file_names.TORCH_MODEL
    with path.open("xb") as file:
        torch.save({name: tensors[name].load() for name in written.tensors}, file)
    saved = _of_pth(path)
    if changed := [name for name, tensor in tensors.items() if not same_bytes(tensor, saved[name])]:
        raise broken(path, f"is damaged: {changed[0]} differs from what was written")
    for name in (*written.hashes, *(index.name for index in folder.glob(f"*{file_names.INDEX_END}"))):
        (folder / name).unlink()
    return Written(written.tensors, marker.hashes_of(folder, [path.name]), written.non_finite)
