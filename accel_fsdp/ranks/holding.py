"""Measures what one rank holds of a prepared model, unit by unit, on the wrapped model itself."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accel_fsdp.checkpoints import tensor_names
from accel_fsdp.config import Engine
from accel_fsdp.job import from_run
from accel_fsdp.launch_environment import EXPERT_AXIS, TENSOR_AXIS
from accel_fsdp.library_internals import Internal
from accel_fsdp.models import counting
from accel_fsdp.ranks.events import RankEvent

if TYPE_CHECKING:
    from torch import nn

FLAT = "torch.distributed.fsdp._flat_param:FlatParameter"
RELIES_ON = (
    Internal(f"{FLAT}._unpadded_unsharded_size"),
    Internal(f"{FLAT}._param_infos"),
    Internal(f"{FLAT}._numels"),
    Internal("torch.distributed.fsdp:FSDPModule._get_fsdp_state", "self"),
)
DEEPSPEED_ALIGNMENT = 2
"""DeepSpeed pads each rank's part of a group of parameters to a multiple of this many elements
(`DeepSpeedZeroOptimizer.nccl_start_alignment_factor`)."""
SPLIT_ALONE = "layers split by tp"
WRAPPERS = (*tensor_names.WRAPPERS, "module")
"""The last one is used by DDP and DeepSpeed."""


@dataclass(frozen=True)
class HeldUnit:
    """Weights that are gathered together: their number in all, `held` on this rank, and the most on any rank (`share`).

    `name` is the path of its module, empty for the model itself; `kind` the module's class; `ranks` share the unit;
    `reshards`: it is sharded again between forward and backward. `states_alone`: only the optimizer's states are
    sharded, and each rank holds all weights. `is_split`: tensor parallelism has split a layer in it; `is_of_experts`:
    expert parallelism has divided it.
    """

    name: str
    kind: str
    weights: int
    held: int
    share: int
    ranks: int
    reshards: bool = True
    states_alone: bool = False
    is_split: bool = False
    is_of_experts: bool = False


@dataclass(frozen=True)
class Holding:
    """The weights that a rank holds of one model.

    `whole` is the number of weights outside of units, which this rank holds in full. `kinds` counts the model's modules
    with weights by class. `classes` are the layer classes by which Accelerate wrapped it, where it did.
    """

    model: str
    engine: str
    units: tuple[HeldUnit, ...]
    whole: int
    kinds: dict[str, int]
    classes: tuple[str, ...] = ()

    @property
    def weights(self) -> int:
        """The number of weights of the whole model."""
        return self.whole + sum(unit.weights for unit in self.units if not unit.states_alone)

    @property
    def held(self) -> int:
        """The number of weights on this rank."""
        return self.whole + sum(unit.held for unit in self.units if not unit.states_alone)


def holdings(events: Iterable[RankEvent]) -> dict[int, Holding]:
    """The weights that each rank held at its first step, or after `prepare` if it took no step."""
    by_rank: dict[int, Holding] = {}
    all_events = list(events)
    for kind in ("prepared", "stepped"):
        of_kind = sorted((event for event in all_events if event.kind == kind), key=is_alone)
        by_rank |= {event.rank: _parse_holding(event.content["holding"]) for event in of_kind}
    return by_rank


def is_alone(event: RankEvent) -> bool:
    """Whether a measured model is in no wrapper that averages its gradients."""
    return bool(event.content["holding"]["engine"] == Engine.NONE.label)


def _parse_holding(content: Mapping[str, Any]) -> Holding:
    units = tuple(HeldUnit(**unit) for unit in content["units"])
    return Holding(**{**content, "units": units, "classes": tuple(content.get("classes", ()))})


def measure(model: "nn.Module") -> Holding:
    """Measures a model, wrapped or not, as it is used in training."""
    units, counted = [], set()
    for unit, parameters in _units(model):
        units.append(unit)
        counted |= parameters
    unsharded = sum(count for parameter, count in counting.weights(model).items() if id(parameter) not in counted)
    inner = unwrapped(model)
    kinds = Counter(
        class_name(module)
        for module in inner.modules()
        if unwrapped(module) is module and any(True for _ in module.parameters())
    )
    engine = SPLIT_ALONE if any(unit.kind == SPLIT_ALONE for unit in units) else from_run.engine_of(model)
    return Holding(class_name(inner), engine, tuple(units), unsharded, dict(kinds))


def unwrapped(model: Any) -> "nn.Module":
    """The user's own module, inside of all wrappers."""
    while (inner := next((getattr(model, name) for name in WRAPPERS if _wraps(model, name)), None)) is not None:
        model = inner
    return model  # type: ignore[no-any-return]


def user_name(path: str) -> str:
    """A module's path without the names that wrappers add."""
    return ".".join(part for part in path.split(".") if part not in WRAPPERS)


def is_unit(module: "nn.Module") -> bool:
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    return isinstance(module, FSDPModule | FullyShardedDataParallel)


def class_name(module: "nn.Module") -> str:
    return str(plain_class(unwrapped(module)).__name__)


def plain_class(module: "nn.Module") -> Any:
    """The user's class of a module, from which `fully_shard` derives another: FSDPLinear from Linear."""
    from torch.distributed.fsdp import FSDPModule

    kinds = type(module).__mro__
    return next(kind for kind in kinds[FSDPModule in kinds :] if kind is not FSDPModule)


def _wraps(model: Any, name: str) -> bool:
    from torch.nn.parallel import DistributedDataParallel

    if name == "module":
        return isinstance(model, DistributedDataParallel) or from_run.is_deepspeed(model)
    return name in getattr(model, "_modules", ())


def _units(model: Any) -> Iterator[tuple[HeldUnit, set[int]]]:
    """Yields each unit with the ids of the parameters that it shards."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    if from_run.is_deepspeed(model):
        yield from _deepspeed_units(model)
        return
    counted_ids: set[int] = set()
    for path, module in model.named_modules():
        name = user_name(path)
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
            yield _fsdp1_unit(name, module)
        elif isinstance(module, FSDPModule):
            yield from _fsdp2_units(name, module, counted_ids)
    if not counted_ids and (split := [p for p in model.parameters() if hasattr(p, "placements")]):
        yield _dtensor_unit("", SPLIT_ALONE, [(parameter, 1) for parameter in split], 1)


def _fsdp1_unit(name: str, module: Any) -> tuple[HeldUnit, set[int]]:
    from torch.distributed.fsdp import ShardingStrategy

    flat, several = module._handle.flat_param, module._handle.world_size
    elements = flat._unpadded_unsharded_size.numel()
    infos = zip(flat._param_infos, flat._numels, strict=True)
    weights = sum(numel * counting.per_element(info.module, info.param_name, flat) for info, numel in infos)
    is_unsharded = module.sharding_strategy == ShardingStrategy.NO_SHARD
    reshards = module.sharding_strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)
    ranks = 1 if is_unsharded else several
    own_weights, share = flat.numel() * weights // elements, _largest_part(elements, ranks) * weights // elements
    unit = HeldUnit(name, class_name(module), weights, own_weights, share, ranks, reshards)
    views = {id(view) for view in module.parameters(recurse=True)} if module._use_orig_params else set()
    return unit, {id(flat), *views}


def _fsdp2_units(name: str, module: Any, counted_ids: set[int]) -> Iterator[tuple[HeldUnit, set[int]]]:
    """A module may have several groups, one per mesh, or share one. `counted_ids` holds the ids of counted groups."""
    for group in groups(module._get_fsdp_state()):
        if id(group) in counted_ids:
            continue
        counted_ids.add(id(group))
        owners = ((param.sharded_param, param._module_info) for param in group.fsdp_params)
        pairs = [(own, counting.per_element(info.module, info.param_name, own)) for own, info in owners]
        ranks = getattr(group.mesh_info, "shard_mesh_size", 1)
        yield _dtensor_unit(name, class_name(module), pairs, ranks, group.post_forward_mesh_info is not None)


def _dtensor_unit(
    name: str, kind: str, pairs: Sequence[tuple[Any, int]], ranks: int, reshards: bool = False
) -> tuple[HeldUnit, set[int]]:
    """A unit of DTensors, each with its number of weights per element."""
    parameters = [parameter for parameter, _ in pairs]
    unit = HeldUnit(
        name,
        kind,
        weights=sum(p.numel() * count for p, count in pairs),
        held=sum(p.to_local().numel() * count for p, count in pairs),
        share=sum(_largest_shard(p) * count for p, count in pairs),
        ranks=ranks,
        reshards=reshards,
        is_split=any(_divides(TENSOR_AXIS, p) for p in parameters),
        is_of_experts=any(_divides(EXPERT_AXIS, p) for p in parameters),
    )
    return unit, {id(p) for p in parameters}


def _largest_shard(tensor: Any) -> int:
    """The number of elements in the largest shard of a DTensor."""
    shape = list(tensor.shape)
    for placement, size in zip(tensor.placements, tensor.device_mesh.shape, strict=True):
        if hasattr(placement, "dim"):
            shape[placement.dim] = _largest_part(shape[placement.dim], size)
    return math.prod(shape)


def _divides(axis: str, tensor: Any) -> bool:
    """Whether the ranks of an axis hold different parts of a DTensor."""
    names = tensor.device_mesh.mesh_dim_names or ()
    return any(name == axis and hasattr(place, "dim") for name, place in zip(names, tensor.placements, strict=False))


def groups(state: Any) -> list[Any]:
    """The parameter groups of a module: torch 2.11 has one at most."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def _largest_part(total: int, ranks: int) -> int:
    """The size of the largest of `ranks` parts."""
    return -(-total // ranks)


def _deepspeed_units(model: Any) -> Iterator[tuple[HeldUnit, set[int]]]:
    """Yields each module with direct weights as a unit in stage 3, and in stages 1 and 2 the optimizer's states."""
    import torch.distributed as dist

    ranks, stage = dist.get_world_size(), model.zero_optimization_stage()
    if stage in (1, 2):
        parts = model.optimizer.single_partition_of_fp32_groups
        elements = sum(p.numel() for p in parts)
        trained = sum(p.numel() for p in model.module.parameters() if p.requires_grad)
        share = _largest_part(trained, ranks) + DEEPSPEED_ALIGNMENT * len(parts)
        yield HeldUnit("", "optimizer states", trained, elements, share, ranks, states_alone=True), set()
    if stage < 3:
        return
    for path, module in model.module.named_modules():
        if parameters := list(module.parameters(recurse=False)):
            total, elements = sum(p.ds_numel for p in parameters), sum(p.ds_tensor.ds_numel for p in parameters)
            share = sum(_largest_part(p.ds_numel, ranks) for p in parameters)
            yield HeldUnit(path, type(module).__name__, total, elements, share, ranks), {id(p) for p in parameters}
