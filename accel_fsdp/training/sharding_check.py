"""Proof that a prepared model is sharded: DTensors or flat parameters of the right size, on every rank."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accel_fsdp.config import Engine
from accel_fsdp.errors import UserError
from accel_fsdp.library_internals import Internal
from accel_fsdp.training import counting
from accel_fsdp.units import millions

if TYPE_CHECKING:
    from torch import nn

FLAT = "torch.distributed.fsdp._flat_param:FlatParameter"
RELIES_ON = (
    Internal(f"{FLAT}._unpadded_unsharded_size"),
    Internal(f"{FLAT}._param_infos"),
    Internal(f"{FLAT}._numels"),
)


@dataclass(frozen=True)
class Sharding:
    """What one rank holds. `units` counts FSDP units; the others are of weights, and `local` includes padding."""

    engine: str
    units: int
    shard_ranks: int
    local_weights: int
    total_weights: int

    def __str__(self) -> str:
        held = f"{millions(self.local_weights)} of {millions(self.total_weights)} parameters"
        return f"{self.engine}: {self.units} units, each rank holds {held}"


def measure(model: "nn.Module", allow_unsharded: bool = False) -> Sharding:
    """Reads the sharding off a model after `Accelerator.prepare`.

    `allow_unsharded`: the YAML's `fsdp_ignored_modules` keeps some parameters whole on purpose.

    Raises:
        UserError: it holds unsharded parameters although more than one rank shares it.
    """
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    if isinstance(model, FSDPModule):
        return _measure_fsdp2(model, allow_unsharded)
    if isinstance(model, FullyShardedDataParallel):
        return _measure_fsdp1(model)
    raise unsharded(f"{type(model).__name__} was not wrapped at all")


def _measure_fsdp2(model: Any, allow_unsharded: bool) -> Sharding:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    packing = counting.packing(model)
    parameters = list(packing)
    sharded = [p for p in parameters if isinstance(p, DTensor) and any(place.is_shard() for place in p.placements)]
    if not sharded or (len(sharded) < len(parameters) and not allow_unsharded):
        raise unsharded(f"{len(parameters) - len(sharded)} of {len(parameters)} parameters are no sharded DTensors")
    mesh = sharded[0].device_mesh
    local = {p: p.to_local() if isinstance(p, DTensor) else p for p in parameters}
    return Sharding(
        engine=Engine.FSDP2.value,
        units=sum(isinstance(module, FSDPModule) for module in model.modules()),
        shard_ranks=mesh.size(mesh.ndim - 1),
        local_weights=sum(local[parameter].numel() * several for parameter, several in packing.items()),
        total_weights=sum(parameter.numel() * several for parameter, several in packing.items()),
    )


def _measure_fsdp1(model: Any) -> Sharding:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    handles = [unit._handle for unit in FullyShardedDataParallel.fsdp_modules(model) if unit._handle is not None]
    no_shard = model.sharding_strategy == ShardingStrategy.NO_SHARD
    for handle in handles:
        total, local = handle.flat_param._unpadded_unsharded_size.numel(), handle.flat_param.numel()
        if not no_shard and local != -(-total // handle.world_size):
            raise unsharded(f"a flat parameter of {total} elements has {local} on this rank of {handle.world_size}")
    counts = [_in_flat(handle.flat_param) for handle in handles]
    return Sharding(
        engine=f"FSDP1 {model.sharding_strategy.name}",
        units=len(handles),
        shard_ranks=1 if no_shard else handles[0].world_size,
        local_weights=sum(local for local, _ in counts),
        total_weights=sum(total for _, total in counts),
    )


def _in_flat(flat: Any) -> tuple[int, int]:
    """Weights of a flat parameter on this rank and on all; where some are packed, each rank counts as its share."""
    infos = zip(flat._param_infos, flat._numels, strict=True)
    elements = flat._unpadded_unsharded_size.numel()
    more = sum(numel * (counting.per_element(info.module, info.param_name, flat) - 1) for info, numel in infos)
    return flat.numel() * (elements + more) // elements, elements + more


def unsharded(what: str) -> UserError:
    """The error for a model that is not sharded, or not enough."""
    return UserError(
        f"the model is not sharded: {what}",
        why="every rank would train, and pay for, the whole model",
        fix="distributed_type: FSDP in the YAML, and no --multi_gpu or --fsdp flag beside it",
    )
