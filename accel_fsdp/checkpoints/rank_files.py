"""Files that each rank wrote with torch.save, as verl, SkyRL and hand-made loops do: DTensors, or plain shards.

A DTensor says where its part belongs. A plain shard doesn't: it is a part along the first dimension if the ranks' parts
add up to the shape that the model's config gives, and a copy of the whole if each has that shape. Beside DTensors, a
plain tensor that is equal in all files is a copy too: a buffer.
"""

from functools import partial
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from accel_fsdp import library_internals
from accel_fsdp.checkpoints import file_names, saved_files
from accel_fsdp.checkpoints.saved_files import ERRORS, Keys, SavedFile
from accel_fsdp.checkpoints.stored import Box, Shapes, Stored, assembled, same_bytes, short_name
from accel_fsdp.checkpoints.tensor_names import clean_name
from accel_fsdp.errors import UserError
from accel_fsdp.library_internals import Internal
from accel_fsdp.units import first_few
from accel_fsdp.untrusted_files import broken

PLACEMENTS = ("Replicate", "Shard", "_StridedShard")
RELIES_ON = (
    Internal(
        "torch.distributed.tensor._utils:_compute_local_shape_and_global_offset",
        "global_shape mesh_shape my_coordinate placements *",
    ),
)


def read(folder: Path, shapes: Shapes | None) -> dict[tuple[str, ...], Stored]:
    """The model's tensors by their keys; `shapes` are those of its config, None if unknown.

    Raises:
        UserError: a file is damaged, a rank lacks a tensor, or it is unknown how the parts belong together.
    """
    ranks = [SavedFile(path) for path in file_names.of_ranks(folder).values()]
    try:
        keys_by_rank = [list(saved_files.keys_of(file.content)) for file in ranks]
        for file, of_rank in zip(ranks, keys_by_rank, strict=True):
            if unlike := sorted(".".join(map(str, keys)) for keys in {*keys_by_rank[0]} ^ {*of_rank}):
                raise broken(file.path, f"and {ranks[0].path.name} hold different tensors: {first_few(unlike, 3)}")
        has_dtensors = any(isinstance(ranks[0].tensor(keys), DTensor) for keys in keys_by_rank[0])
        return {tuple(map(str, keys)): _tensor(keys, ranks, shapes, has_dtensors) for keys in keys_by_rank[0]}
    except ERRORS as error:
        raise broken(folder, f"holds files that don't belong together: {type(error).__name__} {error}") from error


def _tensor(keys: Keys, ranks: list[SavedFile], shapes: Shapes | None, has_dtensors: bool) -> Stored:
    tensor = ranks[0].tensor(keys)
    short_name(tensor.dtype, ranks[0].path)
    if isinstance(tensor, DTensor):
        return _of_dtensors(keys, ranks, tensor)
    parts = [file.stored(keys) for file in ranks]
    name = str(keys[-1])
    expected = None if shapes is None else shapes.get(clean_name(name).removeprefix("module."))
    if has_dtensors and expected is None:
        expected = parts[0].shape
    if expected is not None and all(part.shape == expected for part in parts):
        if not all(same_bytes(parts[0], part) for part in parts[1:]):
            raise _unclear(ranks[0].path, f"{name} is whole in each rank's file, and differs between them")
        return parts[0]
    rows = sum(part.shape[0] if part.shape else 0 for part in parts)
    if expected is None or not expected or expected != (rows, *parts[0].shape[1:]):
        raise _unclear(ranks[0].path, f"{name} is {[list(part.shape) for part in parts]} in the ranks' files")
    offsets = [sum(part.shape[0] for part in parts[:rank]) for rank in range(len(parts))]
    boxes = [
        Box(file.path, (offset, *(0 for _ in part.shape[1:])), part.shape, part.load)
        for file, offset, part in zip(ranks, offsets, parts, strict=True)
    ]
    return assembled(name, expected, parts[0].dtype, boxes)


def _of_dtensors(keys: Keys, ranks: list[SavedFile], first: DTensor) -> Stored:
    mesh, shape = first.device_mesh.mesh, tuple(first.shape)
    if mesh.numel() != len(ranks):
        raise broken(ranks[0].path, f"is one of {mesh.numel()} ranks' files, and {len(ranks)} are there")
    library_internals.check(*RELIES_ON, why="it is unclear how the parts of ranks belong together")
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    boxes: dict[tuple[int, ...], Box] = {}
    for rank, file in enumerate(ranks):
        place = [int(index) for index in (mesh == mesh.flatten().sort()[0][rank]).nonzero()[0]]
        placements = _dtensor(file, keys).placements
        if any(type(placement).__name__ not in PLACEMENTS for placement in placements):
            raise _unclear(file.path, f"a tensor is placed as {placements}")
        sizes, offsets = _compute_local_shape_and_global_offset(shape, tuple(mesh.shape), place, placements)
        if all(sizes):
            boxes.setdefault(offsets, Box(file.path, offsets, sizes, partial(_local, file, keys)))
    return assembled(str(keys[-1]), shape, first.dtype, list(boxes.values()))


def _dtensor(file: SavedFile, keys: Keys) -> DTensor:
    tensor = file.tensor(keys)
    if not isinstance(tensor, DTensor):
        raise broken(file.path, f"holds {keys[-1]} as another kind of tensor than its siblings")
    return tensor


def _local(file: SavedFile, keys: Keys) -> torch.Tensor:
    """The rank's own part."""
    with torch.no_grad():
        return _dtensor(file, keys).to_local()


def _unclear(path: Path, what: str) -> UserError:
    return UserError(
        f"{path} and its siblings: {what}",
        why="it is unclear how the parts belong together",
        fix="give the model that was trained: --model ID_OR_FOLDER; or gather the state on the ranks that wrote it, "
        "and save that: torch.distributed.checkpoint.state_dict.get_model_state_dict with full_state_dict=True",
    )
