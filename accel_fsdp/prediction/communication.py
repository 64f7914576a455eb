"""The bytes that one rank sends per optimizer step, by link. Pure.

The volumes are those of the ZeRO paper (arXiv 1910.02054, section 7) with FSDP's dtypes and units: a ring over W ranks
sends (W - 1) / W of what it gathers or reduces from each rank, an all-reduce is a reduce-scatter and an all-gather.

A ring over several machines enters and leaves each machine once. NCCL runs one ring per network port and starts each on
another GPU, so 1 / ranks_per_node of a rank's bytes cross the network and the rest stay inside. Both links
work concurrently: the slower of the two is the ring's bottleneck.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from operator import add
from typing import TypeVar

from accel_fsdp.config import Engine
from accel_fsdp.job import Layout, Recipe
from accel_fsdp.models import state_bytes
from accel_fsdp.prediction.memory import ModelShape, Unit, compute_bytes, master_bytes, shards

Same = TypeVar("Same", bound="Amounts")


class Amounts:
    """Base of dataclasses whose fields are all numbers: they add up, and multiply, field by field."""

    def __add__(self: Same, added: Same) -> Same:
        return type(self)(*map(add, vars(self).values(), vars(added).values()))

    def times(self: Same, count: float) -> Same:
        return type(self)(*(amount * count for amount in vars(self).values()))


@dataclass(frozen=True)
class Traffic(Amounts):
    """Bytes one rank sends: to GPUs of its machine, to other machines, and between GPU and host, both ways."""

    intra_bytes: float = 0
    inter_bytes: float = 0
    pcie_bytes: float = 0


def units(shape: ModelShape, recipe: Recipe, layout: Layout) -> tuple[Unit, ...]:
    """The units that text goes through, in the order of the forward pass."""
    return tuple(unit for unit in shards.all_units(shape, recipe, layout) if not unit.idle)


def _is_kept(unit: Unit, layout: Layout) -> bool:
    """Whether a unit stays gathered from forward to backward: one all-gather instead of two.

    FSDP1 keeps the root, which has all parameters outside the blocks, gathered (`_post_forward_reshard` skips
    `_is_root`); accelerate 1.15 never reshards FSDP2's unit with the head.
    """
    if unit.block is None and unit.name != "embedding":
        return layout.engine is not Engine.DEEPSPEED
    return _keeps(layout)


def step_traffic(shape: ModelShape, recipe: Recipe, layout: Layout) -> Traffic:
    """The bytes that one rank of a data-parallel layout sends in one optimizer step, over all its micro-batches."""
    total = update(shape, recipe, layout)
    for unit in units(shape, recipe, layout):
        gathers = gather(unit, recipe, layout).times(gathers_per_step(unit, recipe, layout))
        reduces = reduce(unit, recipe, layout).times(reduces_per_step(recipe, layout))
        total += (gathers + reduces).times(unit.count)
    return total + copied_inputs(shape, recipe)


def gather(unit: Unit, recipe: Recipe, layout: Layout) -> Traffic:
    """One all-gather of one unit; with offload its shard is first copied from the host, in the dtype stored there."""
    if _replicates(layout) or not (layout.is_sharded or layout.offload):
        return Traffic()
    volume = sum(count * width for count, width in gathered(unit, recipe))
    copied_bytes = sum(count * _host_width(width, recipe, layout) for count, width in gathered(unit, recipe))
    host = Traffic(pcie_bytes=layout.shard_of(copied_bytes) if layout.offload else 0)
    return _ring(volume, layout.sharers(of_experts=False), layout.ranks_per_node) + host


def copied_inputs(shape: ModelShape, recipe: Recipe) -> Traffic:
    """The copies of layers' inputs to host memory and back in a step; no computation hides them.

    (`save_on_cpu` copies on the stream that computes.)
    """
    size = recipe.rows * recipe.length * shape.hidden * compute_bytes(recipe)
    copies = 2 * shape.depth * recipe.accumulation if recipe.has_inputs_on_host else 0
    return Traffic(pcie_bytes=size * copies)


def reduce(unit: Unit, recipe: Recipe, layout: Layout) -> Traffic:
    """One reduction of a unit's gradients: reduce-scatter over shards, all-reduce over replicas."""
    volume = unit.trained_numel * sent_gradient_bytes(recipe, layout)
    scattered = _ring(volume, layout.sharers(of_experts=False), layout.ranks_per_node)
    remote = 1 if layout.is_sharded else layout.ranks_per_node  # hybrid: a rank's replicas are on other machines
    width = compute_bytes(recipe) if layout.engine is Engine.DEEPSPEED else master_bytes(recipe, layout)
    offloaded = Traffic(pcie_bytes=layout.shard_of(unit.trained_numel * width) if layout.offload else 0)
    return scattered + _ring(layout.shard_of(volume), layout.replicas, remote).times(2) + offloaded


def copied(unit: Unit, recipe: Recipe, layout: Layout) -> tuple[float, float]:
    """Bytes through the GPU's memory for one gather and one reduction, which wait for these copies.

    FSDP2 and ZeRO copy gathered data into the parameters, and gradients of all parameters into one buffer
    (`foreach_all_gather_copy_out`, `foreach_reduce_scatter_copy_in`); FSDP1 gathers in place, and autograd joins the
    gradients of its views. DDP copies gradients into buckets and back.
    """
    if layout.ranks == 1:
        return 0, 0
    elements, width = unit.trained_numel, compute_bytes(recipe)
    sent = sent_gradient_bytes(recipe, layout)
    if layout.engine is Engine.DDP or not layout.is_sharded:
        return 0, elements * 4 * sent
    total = sum(count * size for count, size in gathered(unit, recipe))
    in_place = layout.engine is Engine.FSDP1 or _replicates(layout)
    return 0 if in_place else 2 * total, elements * (width + sent + (2 * width if layout.engine is Engine.FSDP1 else 0))


def update(shape: ModelShape, recipe: Recipe, layout: Layout) -> Traffic:
    """Traffic after the optimizer: ZeRO-1 and 2 gather the updated weights, which their ranks hold whole."""
    if not _replicates(layout):
        return Traffic()
    volume = trained_numel(shape, recipe, layout) * compute_bytes(recipe)
    copied = Traffic(pcie_bytes=volume / layout.ranks if layout.offload else 0)
    return _ring(volume, layout.ranks, layout.ranks_per_node) + copied


def gathers_per_step(unit: Unit, recipe: Recipe, layout: Layout) -> int:
    """How often a unit is gathered: before forward and, unless kept, before backward of each micro-batch.

    FSDP1 frees kept units only after a synchronised backward (`_should_free_in_backward`): once for all micro-batches.
    """
    if layout.engine is Engine.FSDP1 and _keeps(layout):
        return 1
    return recipe.accumulation * (1 if _is_kept(unit, layout) else 2)


def reduces_per_step(recipe: Recipe, layout: Layout) -> int:
    """How often gradients are reduced; ZeRO-2 and 3 can't wait for the last micro-batch."""
    is_zero = layout.engine is Engine.DEEPSPEED and layout.strategy >= 2
    return recipe.accumulation if is_zero else 1


def gathered(unit: Unit, recipe: Recipe) -> Iterable[tuple[int, float]]:
    """Elements of a gathered unit with their bytes per element."""
    for param in unit.parameters:
        yield param.numel, state_bytes.NF4_BYTES if param.quantized else param.compute


def gathered_alone(unit: Unit, layout: Layout) -> int:
    """The number of adapter weights that are separate units: FSDP1's flat parameters can't mix frozen and trained.

    (PEFT's `fsdp_auto_wrap_policy`.)
    """
    if layout.engine is not Engine.FSDP1 or not layout.is_sharded:
        return 0
    return sum(param.adapter for param in unit.parameters)


def trained_numel(shape: ModelShape, recipe: Recipe, layout: Layout) -> int:
    return sum(unit.count * unit.trained_numel for unit in units(shape, recipe, layout))


def sent_gradient_bytes(recipe: Recipe, layout: Layout) -> int:
    """Bytes per element of a reduced gradient: in the weights' dtype under DDP, in the reduce dtype under FSDP.

    (accelerate 1.15 sets FSDP's reduce_dtype to that of mixed precision: `set_mixed_precision`.)
    """
    if layout.engine in (Engine.DDP, Engine.NONE):
        return master_bytes(recipe, layout)
    return shards.reduce_bytes(recipe, layout)


def _host_width(width: float, recipe: Recipe, layout: Layout) -> float:
    """Bytes per element that come from the host: FSDP casts on the GPU, ZeRO on the host, 4 bits stay packed."""
    if layout.engine is Engine.DEEPSPEED or width == state_bytes.NF4_BYTES:
        return width
    return master_bytes(recipe, layout) if recipe.method == "full" else state_bytes.DTYPE_BYTES[recipe.dtype]


def _replicates(layout: Layout) -> bool:
    """Whether all ranks hold all weights although the optimizer is sharded."""
    return layout.engine is Engine.DEEPSPEED and layout.strategy < 3


def _keeps(layout: Layout) -> bool:
    """Whether blocks stay gathered from forward to backward."""
    return layout.is_fsdp and layout.strategy in (2, 5)


def _ring(volume_bytes: float, ranks: int, ranks_per_node: int) -> Traffic:
    """One rank's part of an all-gather or reduce-scatter of `volume_bytes`."""
    sent = volume_bytes * (ranks - 1) / ranks
    if ranks <= ranks_per_node:
        return Traffic(intra_bytes=sent)
    network = sent / ranks_per_node
    return Traffic(sent - network, network)
