"""A checkpoint as the library that wrote it puts it together, without that library reading a byte of it.

torch's and DeepSpeed's own readers load pickles that a stranger wrote, and look for files in places of their own. So
the bytes come through the readers of this package, and what they found is handed on: to DCP's planner as the storage
of a checkpoint, to DeepSpeed as a folder written anew. Both then lay out the tensors by themselves.
"""

import tempfile
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_fsdp import library_internals
from accel_fsdp.checkpoints import ITEM_BYTES, FileReader, Inert, View, dcp, deepspeed, file_names, torch_zip
from accel_fsdp.exporter.safetensors_writer import torch_dtype
from accel_fsdp.library_internals import Internal

if TYPE_CHECKING:
    import torch

RELIES_ON = (
    Internal("torch.distributed.checkpoint.default_planner:_EmptyStateDictLoadPlanner"),
    Internal(
        "torch.distributed.checkpoint.state_dict_loader:_load_state_dict",
        "state_dict * storage_reader planner no_dist",
    ),
)
MODEL_STATE = (
    *("buffer_names", "module", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params"),
    *("ds_version", "mp_world_size", "dp_world_size"),
)
OPTIMIZER_STATE = (
    *("zero_stage", "partition_count", "fp32_flat_groups", "single_partition_of_fp32_groups"),
    "param_alignment_paddings",
)
"""What DeepSpeed's conversion reads of its files."""


def tensor_of(reader: FileReader, view: View) -> "torch.Tensor":
    import torch

    piece = view.piece((0,) * len(view.shape))
    needed = 1 + sum((size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True))
    if not prod(view.shape):
        return torch.empty(view.shape, dtype=torch_dtype(view.dtype))
    content = bytearray(needed * ITEM_BYTES[view.dtype])
    reader.read(piece.record, piece.skip, memoryview(content))
    return torch.frombuffer(content, dtype=torch_dtype(view.dtype)).as_strided(view.shape, view.strides)


def of_file(path: Path, reader: FileReader) -> dict[str, Any]:
    content = _thawed(torch_zip.load(reader, path), lambda view: tensor_of(reader, view))
    return content if isinstance(content, dict) else {}


def _thawed(value: Any, make: Callable[[View], Any]) -> Any:
    """With tensors for views, sizes for tuples of numbers, and nothing for what stands for other things."""
    import torch

    if isinstance(value, View):
        return make(value)
    if isinstance(value, dict):
        return {key: _thawed(part, make) for key, part in value.items() if not isinstance(key, Inert)}
    if isinstance(value, tuple) and all(type(part) is int for part in value):
        return torch.Size(value)
    if isinstance(value, (list, tuple)):
        return [_thawed(part, make) for part in value]
    return None if isinstance(value, Inert) else value


def of_dcp(folder: Path, reader: FileReader) -> "dict[tuple[str, ...], torch.Tensor]":
    """The tensors of a distributed checkpoint by path, put together by torch's planner."""
    library_internals.check(*RELIES_ON, why="the export is compared with what torch reads of the checkpoint")
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    entries = dcp.entries(folder, reader)
    state: dict[str, Any] = {}
    planner = _EmptyStateDictLoadPlanner()  # type: ignore[no-untyped-call]
    _load_state_dict(state, storage_reader=_storage(entries, reader), planner=planner, no_dist=True)
    return {entries[name].path: tensor for name, tensor in state.items()}


def _storage(entries: dict[str, dcp.Entry], reader: FileReader) -> Any:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
    from torch.distributed.checkpoint.storage import StorageReader
    from torch.futures import Future

    chunks = {(name, offsets): view for name, entry in entries.items() for offsets, view in entry.chunks}

    class Storage(StorageReader):
        def reset(self, checkpoint_id: Any = None) -> None: ...

        def read_metadata(self, *args: Any, **options: Any) -> Metadata:
            made: Metadata = _metadata(entries)
            return made

        def set_up_storage_reader(
            self, metadata: Metadata, is_coordinator: bool, *args: Any, **options: Any
        ) -> None: ...

        def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
            return plan

        def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
            return plans

        def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
            for item in plan.items:
                stored = tensor_of(reader, chunks[item.storage_index.fqn, tuple(item.storage_index.offset or ())])
                for along, (at, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    stored = stored.narrow(along, at, length)
                target = planner.resolve_tensor(item).detach()
                target.copy_(stored)
                planner.commit_tensor(item, target)
            done: Future[None] = Future()
            done.set_result(None)
            return done

        @classmethod
        def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
            return True

    return Storage()


def _metadata(entries: dict[str, dcp.Entry]) -> Any:
    import torch
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    listed: dict[str, Any] = {}
    places: dict[MetadataIndex, Any] = {}
    for name, entry in entries.items():
        boxes = [ChunkStorageMetadata(torch.Size(at), torch.Size(view.shape)) for at, view in entry.chunks]
        properties = TensorProperties(dtype=torch_dtype(entry.dtype))
        listed[name] = TensorStorageMetadata(properties, torch.Size(entry.shape), boxes)
        places |= {MetadataIndex(name, torch.Size(at)): None for at, _ in entry.chunks}
    return Metadata(listed, storage_data=places)


def of_zero(folder: Path, reader: FileReader, room: Path) -> "dict[str, torch.Tensor]":
    """The float32 weights of a ZeRO checkpoint, put together by DeepSpeed from files written anew into `room`."""
    import torch
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with tempfile.TemporaryDirectory(prefix=".zero-", dir=room) as place:
        made = Path(place) / "step"
        made.mkdir()
        for path in [*folder.glob(file_names.ZERO_MODELS), *folder.glob(file_names.ZERO_OPTIMIZERS)]:
            content = torch_zip.load(reader, path, deepspeed.ADMITTED)
            held = content.get("optimizer_state_dict")
            kept: dict[str, Any] = {key: content[key] for key in MODEL_STATE if key in content}
            if path.match(file_names.ZERO_OPTIMIZERS) and isinstance(held, dict):
                kept = {"optimizer_state_dict": {key: held[key] for key in OPTIMIZER_STATE if key in held}}
            torch.save(_thawed(kept, lambda view: tensor_of(reader, view)), made / path.name)
        found = get_fp32_state_dict_from_zero_checkpoint(place, tag=made.name)
        return {name: tensor.clone() for name, tensor in found.items()}
