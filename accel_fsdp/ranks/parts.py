"""The location of a rank's part of a weight, its gradient or its optimizer state within the whole tensor."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from accel_fsdp.library_internals import Internal
from accel_fsdp.ranks.holding import FLAT, groups, user_name

if TYPE_CHECKING:
    import torch
    from torch import nn

Start: TypeAlias = "int | list[int | list[int]]"
Parts: TypeAlias = "dict[str, tuple[Start, torch.Tensor]]"
"""By the name of a weight: where this rank's part starts in it, and the part."""
RELIES_ON: tuple[Internal, ...] = (
    Internal(f"{FLAT}._params"),
    Internal(f"{FLAT}._shapes"),
    Internal(f"{FLAT}._shard_param_infos"),
    Internal("torch.distributed.tensor._utils:compute_local_shape_and_global_offset", "global_shape mesh placements *"),
    Internal("torch.distributed.tensor.placement_types:_StridedShard._split_tensor", "self tensor num_chunks *"),
)


@dataclass(frozen=True)
class Place:
    """The location of a part: `start` is its offset in each dimension of the weight, or the indices of its rows there.

    FSDP1 cuts flattened weights: there `start` counts the elements before the part. With `use_orig_params: false` one
    `parameter` holds the parts of several weights, and `within` is the range of this one. `shape` is the whole one's,
    and `shard` the range of the part in FSDP1's parameter `flat`.
    """

    name: str
    parameter: "torch.Tensor"
    start: Start
    shape: tuple[int, ...]
    within: slice | None = None
    flat: Any = None
    shard: slice | None = None

    def now(self) -> "torch.Tensor":
        """A copy of the part as the rank keeps it, also while FSDP1 has gathered the weight."""
        if self.flat is None:
            return self.part(self.parameter)
        kept: torch.Tensor = getattr(self.flat, "_local_shard", self.flat).detach()[self.shard]
        return kept.cpu().clone()

    def part(self, values: Any) -> "torch.Tensor":
        """A copy of the part, from a tensor laid out as `parameter` is, such as its gradient."""
        local_values: torch.Tensor = local(placed_as(values.detach(), self.parameter))
        local_values = local_values.reshape(-1) if isinstance(self.start, int) else local_values
        return (local_values if self.within is None else local_values[self.within]).cpu().clone()

    def part_of(self, whole: "torch.Tensor") -> "torch.Tensor":
        """The part of another whole tensor of this weight's shape."""
        values = whole.detach().reshape(-1) if isinstance(self.start, int) else whole.detach()
        return values[_index(self.start, self.now())].clone()


def placed_as(values: Any, like: Any) -> Any:
    """A DTensor with the placements of another, such as a gradient with its weight's; other values unchanged.

    The gradient of a split embedding is a pending sum over ranks. Collective.
    """
    placements = getattr(like, "placements", None)
    if placements is None or getattr(values, "placements", placements) == placements:
        return values
    return values.redistribute(placements=placements)


def local(tensor: Any) -> Any:
    """This rank's part of a DTensor; any other tensor, and None, unchanged."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def places(model: "nn.Module") -> list[Place]:
    """The places of all parts that this rank holds of a prepared model."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    places: list[Place] = []
    paths = {id(module): user_name(path) for path, module in model.named_modules()}
    sharded: set[int] = set()
    for module in model.modules():
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
            flat = module._handle.flat_param
            places += _places_in_flat(flat, paths)
            sharded |= {id(parameter) for parameter in (flat, *(flat._params or ()), *(flat._shared_params or ()))}
        elif isinstance(module, FSDPModule):
            for param in (param for group in groups(module._get_fsdp_state()) for param in group.fsdp_params):
                own, info = _sharded(param), param._module_info
                if id(own) not in sharded:
                    name = ".".join(filter(None, (paths[id(info.module)], info.param_name)))
                    places.append(Place(name, own, _offsets(own), tuple(own.shape)))
                    sharded |= {id(own), id(getattr(param, "_unsharded_param", None))}
    for path, parameter in model.named_parameters():
        if id(parameter) not in sharded:
            places.append(Place(user_name(path), parameter, _offsets(parameter), tuple(parameter.shape)))
    return places


def unsharded(rank_places: Iterable[Place]) -> list[str]:
    """The names of the weights that a rank holds whole beside sharded ones."""
    places = list(rank_places)
    whole = [place.name for place in places if is_whole(place)]
    return whole if len(whole) < len(places) else []


def is_whole(place: Place) -> bool:
    from torch.distributed.tensor import DTensor

    return place.flat is None and not isinstance(place.parameter, DTensor)


def parts(places: Iterable[Place], values: Callable[["torch.Tensor"], Any]) -> Parts:
    """This rank's parts of the tensors that `values` returns for parameters, without None."""
    tensors = ((place, values(place.parameter)) for place in places)
    return {place.name: (place.start, place.part(tensor)) for place, tensor in tensors if tensor is not None}


def not_zero(parts: Parts) -> Parts:
    return {name: (start, part) for name, (start, part) in parts.items() if bool(part.any())}


def same(first: Parts, other: Parts) -> bool:
    """Whether two records hold the same values; weights that FSDP1 has gathered aren't compared."""
    if first.keys() != other.keys():
        return False
    pairs = ((part, other[name][1]) for name, (_, part) in first.items())
    return all(left.equal(right) for left, right in pairs if left.shape == right.shape)


def whole(shape: "torch.Size", name: str, of_ranks: Iterable[Parts]) -> "torch.Tensor | None":
    """A weight's whole value from the ranks' parts; None if no rank has a part."""
    import torch

    total: torch.Tensor | None = None
    for start, part in (parts[name] for parts in of_ranks if name in parts):
        total = torch.zeros(shape, dtype=part.dtype) if total is None else total
        (total.view(-1) if isinstance(start, int) else total)[_index(start, part)] = part
    return total


def _index(start: Start, part: "torch.Tensor") -> Any:
    if isinstance(start, int):
        return slice(start, start + part.numel())
    pairs = zip(start, part.shape, strict=True)
    return tuple(first if isinstance(first, list) else slice(first, first + size) for first, size in pairs)


def names_of(places: Iterable[Place]) -> Mapping[int, list[str]]:
    """For each parameter of an optimizer, by its id, the weights of which it holds parts."""
    names: dict[int, list[str]] = {}
    for place in places:
        names.setdefault(id(place.parameter), []).append(place.name)
    return names


def _sharded(param: Any) -> Any:
    """The optimizer's part of a weight: between forward and backward the module may have the whole weight.

    Before the first forward pass only the module has a part that was loaded after sharding.
    """
    sharded, info = param.sharded_param, param._module_info
    return getattr(info.module, info.param_name) if sharded.is_meta else sharded


def _places_in_flat(flat: Any, paths: Mapping[int, str]) -> Iterator[Place]:
    originals = flat._params or [None] * len(flat._param_infos)
    infos = zip(flat._param_infos, flat._shapes, flat._shard_param_infos, originals, strict=True)
    for info, shape, shard, original in infos:
        if not shard.in_shard:
            continue
        name = ".".join(filter(None, (paths[id(info.module)], info.param_name)))
        shard_range = slice(shard.offset_in_shard, shard.offset_in_shard + shard.numel_in_shard)
        parameter, part_range = (flat, shard_range) if original is None else (original, None)
        yield Place(name, parameter, shard.intra_param_start_idx, tuple(shape), part_range, flat, shard_range)


def _offsets(parameter: Any) -> list[int | list[int]]:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    from torch.distributed.tensor.placement_types import _StridedShard

    if not isinstance(parameter, DTensor):
        return [0] * parameter.dim()
    if any(isinstance(place, _StridedShard) for place in parameter.placements):
        return _strided_offsets(parameter)
    _, offsets = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return list(offsets)


def _strided_offsets(tensor: Any) -> list[int | list[int]]:
    """The offsets of a part that a later dimension of the mesh split first, as tensor parallelism does before FSDP.

    For rows that aren't contiguous, as of fused matrices, these are their indices.
    """
    import torch
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    indices = [torch.arange(size) for size in tensor.shape]
    coordinate = tensor.device_mesh.get_coordinate()
    for place, ranks, index in zip(tensor.placements, tensor.device_mesh.shape, coordinate, strict=True):
        if isinstance(place, Shard | _StridedShard):
            shard = _StridedShard(0, split_factor=place.split_factor) if isinstance(place, _StridedShard) else Shard(0)
            indices[place.dim] = shard._split_tensor(indices[place.dim], ranks, with_padding=False)[0][index]
    lists = [rows.tolist() for rows in indices]
    return [rows[0] if rows and rows[-1] - rows[0] == len(rows) - 1 else rows for rows in lists]
