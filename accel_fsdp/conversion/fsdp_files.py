"""Writes Accelerate's sharded checkpoints of FSDP in one process, with one block of a tensor in memory.

FSDP1, FSDP2 and meshes read them on any number of ranks.
"""

import mmap
import warnings
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_fsdp.checkpoints import ITEM_BYTES, FileReader, Stored, file_names
from accel_fsdp.conversion.training_state import GROUPS, PARAMS, TrainingState
from accel_fsdp.exporter import safetensors_writer
from accel_fsdp.library_internals import Internal

if TYPE_CHECKING:
    import torch
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

RELIES_ON = (Internal("torch.distributed._checkpointable:_Checkpointable.__create_write_items__", "self fqn object"),)
BLOCK_BYTES = 1 << 27
"""The size of the parts in which a tensor is stored: as large as a rank's part of a large matrix."""


class _Streamed:
    """A tensor that torch's distributed checkpoints ask for part by part (`torch.distributed._checkpointable`)."""

    def __init__(self, stored: Stored, reader: FileReader, progress: safetensors_writer.Progress) -> None:
        self._stored, self._reader, self._progress = stored, reader, progress
        self._item_bytes = ITEM_BYTES[stored.dtype]

    def __create_write_items__(self, fqn: str, object: object) -> "list[WriteItem]":
        import torch
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        whole, items = torch.Size(self._stored.shape), []
        properties = TensorProperties.create_from_tensor(
            torch.empty(0, dtype=safetensors_writer.torch_dtype(self._stored.dtype))
        )
        for first, rows in self._parts():
            offsets = torch.Size((first, *(0 for _ in whole[1:])) if whole else ())
            sizes = torch.Size((rows, *whole[1:]) if whole else ())
            data = TensorWriteData(ChunkStorageMetadata(offsets, sizes), properties, whole)
            items.append(WriteItem(MetadataIndex(fqn, offsets), WriteItemType.SHARD, tensor_data=data))
        return items

    def part(self, index: "MetadataIndex", block: mmap.mmap) -> "torch.Tensor":
        """Reads the part that `index` names into `block`, if it has room; valid until the next call."""
        import torch

        shape = self._stored.shape
        first = index.offset[0] if index.offset else 0
        rows = next(count for start, count in self._parts() if start == first)
        sizes, row = (rows, *shape[1:]) if shape else (), prod(shape[1:])
        dtype, size_bytes = safetensors_writer.torch_dtype(self._stored.dtype), prod(sizes) * self._item_bytes
        if not size_bytes:
            return torch.empty(sizes, dtype=dtype)
        content = block if size_bytes <= len(block) else bytearray(size_bytes)
        self._stored.read(self._reader, first * row, first * row + prod(sizes), memoryview(content)[:size_bytes])
        self._progress(size_bytes)
        return torch.frombuffer(content, dtype=dtype, count=prod(sizes)).view(sizes)

    def _parts(self) -> Iterator[tuple[int, int]]:
        """First row and number of rows of each part."""
        shape = self._stored.shape
        rows = shape[0] if shape else 1
        row_bytes = prod(shape[1:]) * self._item_bytes
        step = max(1, BLOCK_BYTES // max(row_bytes, 1))
        yield from ((first, min(step, rows - first)) for first in range(0, max(rows, 1), step))


def write(state: TrainingState, folder: Path, reader: FileReader, progress: safetensors_writer.Progress) -> None:
    """Writes weights and optimizer into `folder`; `progress` is called with each number of bytes.

    Raises:
        OSError: the disk is full.
        UserError: a tensor can't be read.
    """
    import torch

    def streamed(tensors: dict[str, Stored]) -> dict[str, Any]:
        return {name: _Streamed(stored, reader, progress) for name, stored in tensors.items()}

    states: dict[str, dict[str, Any]] = {name: streamed(parts) for name, parts in state.moments.items()}
    for name, numbers in state.numbers.items():
        states.setdefault(name, {}).update({key: torch.tensor(number) for key, number in numbers.items()})
    groups = [{**group.settings, PARAMS: group.names} for group in state.groups]
    _save({"model": streamed(state.weights)}, folder / file_names.SHARDED_MODEL)
    _save({"optimizer": {"state": states, GROUPS: groups}}, folder / file_names.SHARDED_OPTIMIZER)


def _save(content: dict[str, Any], folder: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    class Planner(dcp.DefaultSavePlanner):  # type: ignore[misc, name-defined]
        block = mmap.mmap(-1, BLOCK_BYTES)
        """For one part after the other: torch 2.13 holds the tensors of a file until its end."""

        def lookup_object(self, index: "MetadataIndex") -> Any:
            value = self.state_dict[index.fqn]
            return value.part(index, self.block) if isinstance(value, _Streamed) else value

    failure: BaseException | None = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that this is a single process
            writer = FileSystemWriter(folder, per_thread_copy_ahead=0)  # with a GPU, torch reads several parts ahead
            dcp.save(content, storage_writer=writer, planner=Planner(), no_dist=True)  # type: ignore[attr-defined]
    except CheckpointException as error:
        failure = next(iter(error.failures.values()))[0]
    if failure is not None:
        raise failure
