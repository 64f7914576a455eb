"""The memory of each rank between steps: shards of parameters, gradients and optimizer state, to the byte. Pure.

Padding and placement follow torch 2.13: FSDP1 flattens a unit and pads it to the ranks
(`_flat_param.py`, `_init_flat_param_and_metadata`), FSDP2 cuts each parameter along dimension 0
(`_fsdp_param.py`, `padded_sharded_param_size`).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple

from accel_fsdp.config import TORCH_DTYPES, Engine
from accel_fsdp.job import Layout, Recipe
from accel_fsdp.models import optimizers, state_bytes
from accel_fsdp.prediction.memory.shape import Block, ModelShape, Parameter

ALIGNMENT_BYTES = 16  # FSDP1 with use_orig_params pads each parameter to it (`_get_aligned_numel`)


@dataclass(frozen=True)
class HeldParameter:
    """One parameter as a rank holds it. `stored` and `compute` are bytes per element at rest and in use.

    `stored` of a 4-bit weight counts the packed weight alone: FSDP1 leaves the quantisation state on every rank.
    """

    shape: tuple[int, ...]
    stored: float
    compute: int
    trained: bool
    quantized: bool = False
    adapter: bool = False
    embedding: bool = False
    dispatched: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def gathered(self) -> float:
        """Bytes per element in a gathered unit, where packed weights stay packed."""
        return 0.5 if self.quantized else self.compute


Width = Literal["stored", "gathered"]
CACHED = 1024  # equal layers share one unit, which is compared by identity: each size is summed once


@dataclass(frozen=True, eq=False)
class Unit:
    """Parameters that are gathered and reduced together: a block, or with `block` None parameters outside the blocks.

    Under FSDP1 each adapter weight is gathered alone (PEFT's wrap policy). `idle` units are of layers that rows of text
    skip: held, but without gradients and optimizer state. `nested`: the experts of a block, which transformers makes a
    unit of their own where expert parallelism divides them.
    """

    name: str
    parameters: tuple[HeldParameter, ...]
    block: Block | None = None
    idle: bool = False
    nested: bool = False

    @property
    def count(self) -> int:
        return len(self.block.layers) if self.block else 1

    @property
    def trained_numel(self) -> int:
        return sum(param.numel for param in self.parameters if param.trained)


def compute_bytes(recipe: Recipe) -> int:
    """Bytes per element in forward and backward."""
    return state_bytes.DTYPE_BYTES[recipe.dtype if recipe.precision == "no" else TORCH_DTYPES[recipe.precision]]


def reduce_bytes(recipe: Recipe, layout: Layout) -> int:
    """Bytes per element of a gradient in FSDP's reduction: float32 by transformers, forward's dtype by Accelerate."""
    in_float32 = layout.is_by_transformers and recipe.precision != "no"
    return state_bytes.MASTER if in_float32 else compute_bytes(recipe)


def master_bytes(recipe: Recipe, layout: Layout) -> int:
    """Bytes per element of a trained weight at rest."""
    if recipe.method != "full":
        return state_bytes.MASTER
    is_mixed, is_deepspeed = recipe.precision != "no", layout.engine is Engine.DEEPSPEED
    upcasts = layout.is_fsdp and not layout.is_by_transformers  # Accelerate does
    return state_bytes.weight_bytes(state_bytes.DTYPE_BYTES[recipe.dtype], is_mixed, upcasts, is_deepspeed)


def outer_parts(shape: ModelShape, layout: Layout) -> tuple[tuple[Parameter, ...], tuple[Parameter, ...]]:
    """The parameters outside the blocks: those of the first unit, and those of a last one, if there is one.

    accelerate 1.15 (`fsdp2_prepare_model`) gives FSDP2 a unit for an untied input embedding and one for the last norm
    and the head. FSDP1, and FSDP2 with tied embeddings, have all of them in one unit, the first.
    """
    if layout.engine is not Engine.FSDP2 or shape.tied:
        return shape.outer, ()
    embedding = tuple(param for param in shape.outer if param.kind == "embedding")
    return embedding, tuple(param for param in shape.outer if param.kind != "embedding")


class Units(NamedTuple):
    """One unit per distinct block, in the order of `ModelShape.blocks`, and the first and a last unit.

    `experts` are those of each block, None where they aren't units of their own. `again` is a tied table: transformers
    makes the whole model the root unit, which gathers and reduces it again for the head.
    """

    blocks: tuple[Unit, ...]
    first: Unit
    last: Unit | None
    experts: tuple[Unit | None, ...]
    again: Unit | None = None


def distinct_units(shape: ModelShape, recipe: Recipe, layout: Layout) -> Units:
    """The units of a model; equal units are one object."""
    same_units = replace(recipe, rows=1, length=1, accumulation=1, checkpointing="none")
    tensor, experts = layout.tensor, layout.experts
    single_rank = Layout(layout.engine, 1, 1, 1, tensor=tensor, experts=experts)
    return _distinct_units(shape.part(tensor, experts), same_units, single_rank)


def all_units(shape: ModelShape, recipe: Recipe, layout: Layout) -> tuple[Unit, ...]:
    """The distinct units in forward order, each of which the model has `count` times."""
    blocks, first, last, experts, _ = distinct_units(shape, recipe, layout)
    inner = (unit for pair in zip(experts, blocks, strict=True) for unit in pair if unit)
    return (first, *inner, last) if last else (first, *inner)


def resting_bytes(shape: ModelShape, recipe: Recipe, layout: Layout) -> tuple[int, int, int]:
    """The bytes of a rank's parameters, optimizer state and gradients after a step."""
    units, master = all_units(shape, recipe, layout), master_bytes(recipe, layout)
    stored = sum(shard_bytes(unit, layout) * unit.count for unit in units)
    optimizer = sum(optimizer_bytes(unit, recipe, layout) * unit.count for unit in units)
    return stored, optimizer, sum(trained_bytes(unit, layout, master, shard=True) * unit.count for unit in units)


@lru_cache(CACHED)
def _distinct_units(shape: ModelShape, recipe: Recipe, layout: Layout) -> Units:
    def outside(name: str, parameters: tuple[Parameter, ...]) -> Unit:
        return Unit(name, tuple(_held_parameters(parameters, recipe, layout, False)))

    first, last = outer_parts(shape, layout)
    blocks, experts = list[Unit](), list[Unit | None]()
    for index, block in enumerate(shape.blocks):
        params, idle = tuple(_held_parameters(block.parameters, recipe, layout, True)), index in shape.untraced
        own, apart = (tuple(p for p in params if p.dispatched is dispatched) for dispatched in (False, True))
        blocks.append(Unit(block.name, own, block, idle))
        experts.append(Unit(f"{block.name}'s experts", apart, block, idle, nested=True) if apart else None)
    units = outside("embedding" if last else "root", first), outside("head", last) if last else None
    tables = tuple(param for param in first if param.kind == "embedding")
    tied_head = outside("tied head", tables) if shape.tied and layout.is_by_transformers else None
    return Units(tuple(blocks), *units, tuple(experts), tied_head)


def _held_parameters(
    parameters: tuple[Parameter, ...], recipe: Recipe, layout: Layout, inside: bool
) -> Iterator[HeldParameter]:
    """The parameters as the recipe trains them; with LoRA each linear layer inside a block adds its A and B."""
    full = recipe.method == "full"
    compute = compute_bytes(recipe)
    for param in parameters:
        quantized = inside and is_quantized(param, recipe)
        stored = 0.5 if quantized else master_bytes(recipe, layout) if full else state_bytes.DTYPE_BYTES[recipe.dtype]
        yield HeldParameter(
            *(param.shape, stored, compute),
            trained=full,
            quantized=quantized,
            embedding=param.kind == "embedding",
            dispatched=param.dispatched and layout.experts > 1,
        )
        if not full and inside and param.is_adapted(recipe.lora_targets):
            rows, columns = param.shape
            master = master_bytes(recipe, layout)
            yield HeldParameter((recipe.lora_rank, columns), master, compute, trained=True, adapter=True)
            yield HeldParameter((rows, recipe.lora_rank), master, compute, trained=True, adapter=True)


def is_quantized(parameter: Parameter, recipe: Recipe) -> bool:
    """Whether QLoRA packs a block's parameter into 4 bits: linear layers, including experts that are such layers."""
    is_linear = parameter.kind in ("linear", "experts") and not parameter.is_fused_experts
    return recipe.method == "qlora" and is_linear


def pieces_of(param: HeldParameter, layout: Layout) -> int:
    """The number of ranks that share a parameter, or a rank's part of it under tensor or expert parallelism.

    Adapters are added after transformers has sharded the model, so they are whole on each rank.
    """
    if param.adapter and layout.is_by_transformers:
        return 1
    return layout.sharers(of_experts=param.dispatched)


def shard_shape(param: HeldParameter, layout: Layout) -> tuple[int, ...]:
    """FSDP2's shard of one parameter on rank 0, padding included."""
    rows, *others = param.shape or (1,)
    return (-(-rows // pieces_of(param, layout)), *others)


def shard_numel(param: HeldParameter, layout: Layout) -> int:
    return math.prod(shard_shape(param, layout))


def padded_numel(param: HeldParameter, layout: Layout) -> int:
    return shard_numel(param, layout) * pieces_of(param, layout)


def flat_numel(parameters: tuple[HeldParameter, ...], layout: Layout) -> int:
    """The elements of FSDP1's shard of one flat parameter, padding included; NO_SHARD is padded to the ranks too."""
    pieces = layout.ranks if layout.shard_ranks == 1 else layout.shard_ranks
    end = _places(parameters)[-1][1] if parameters else 0
    return -(-end // pieces) * pieces // layout.shard_ranks


def first_numel(parameters: tuple[HeldParameter, ...], layout: Layout) -> int:
    """The elements of parameters in rank 0's shard, without padding: optimizers see views of them."""
    end = flat_numel(parameters, layout)
    return sum(max(min(stop, end) - start, 0) for start, stop in _places(parameters))


def _places(parameters: tuple[HeldParameter, ...]) -> list[tuple[int, int]]:
    """The first and last index of each parameter in the flat one."""
    places, total = [], 0
    for param in parameters:
        step = max(ALIGNMENT_BYTES // param.compute, 1)
        total = -(-total // step) * step
        places.append((total, total + param.numel))
        total += param.numel
    return places


@lru_cache(CACHED)
def shard_bytes(unit: Unit, layout: Layout) -> int:
    """The bytes of one unit's parameters at rest on rank 0."""
    if layout.engine is Engine.FSDP1:
        return round(sum(_flat_bytes(group, layout, "stored") for group in _flat_groups(unit.parameters)))
    return round(sum(shard_numel(param, layout) * param.stored for param in unit.parameters))


def _flat_bytes(group: tuple[HeldParameter, ...], layout: Layout, width: Width) -> float:
    """The shard of one flat parameter; packed weights count as fewer elements of the 16-bit dtype."""
    widths = {float(getattr(param, width)) for param in group}
    if len(widths) > 1:
        return sum(param.numel * float(getattr(param, width)) for param in group) / layout.shard_ranks
    return flat_numel(group, layout) * widths.pop() if group else 0


def _flat_groups(params: tuple[HeldParameter, ...]) -> list[tuple[HeldParameter, ...]]:
    """The groups that FSDP1 flattens: the base, and each adapter weight alone (PEFT's wrap policy)."""
    base = tuple(param for param in params if not param.adapter)
    return [base, *((param,) for param in params if param.adapter)]


@lru_cache(CACHED)
def quantization_bytes(unit: Unit, layout: Layout) -> int:
    """The quantisation state of a unit's 4-bit weights; FSDP1 keeps it whole on every rank."""
    is_whole = layout.engine is Engine.FSDP1
    packed = (param for param in unit.parameters if param.quantized)
    elements = sum(param.numel / (1 if is_whole else pieces_of(param, layout)) for param in packed)
    return round(elements * (state_bytes.NF4_BYTES - 0.5))


def optimizer_bytes(unit: Unit, recipe: Recipe, layout: Layout) -> int:
    """The optimizer state of one unit's trained shards; DeepSpeed makes a state for every tensor that isn't frozen."""
    if unit.idle and layout.engine is not Engine.DEEPSPEED:
        return 0
    return _optimizer_bytes(unit, recipe.optimizer, master_bytes(recipe, layout), layout)


@lru_cache(CACHED)
def _optimizer_bytes(unit: Unit, optimizer: str, master: int, layout: Layout) -> int:
    if optimizer.startswith("adamw_torch"):
        return optimizers.tensor_bytes(optimizer, (_optimized_numel(unit, layout),), master)
    trained = (param for param in unit.parameters if param.trained)
    shapes = ((shard_shape(param, layout), param.embedding) for param in trained)
    has_embeddings = layout.engine is not Engine.DEEPSPEED  # whose partitions no longer belong to an embedding
    return sum(optimizers.tensor_bytes(optimizer, shape, master, known and has_embeddings) for shape, known in shapes)


def _optimized_numel(unit: Unit, layout: Layout) -> int:
    if layout.engine is Engine.FSDP1:
        groups = (group for group in _flat_groups(unit.parameters) if group and group[0].trained)
        return sum(first_numel(group, layout) for group in groups)
    return sum(shard_numel(param, layout) for param in unit.parameters if param.trained)


@lru_cache(CACHED)
def gathered_bytes(unit: Unit, layout: Layout) -> int:
    """The unit unsharded, in the dtype of forward and backward, padding included."""
    if layout.engine is Engine.FSDP1:
        groups = _flat_groups(unit.parameters)
        return round(sum(_flat_bytes(group, layout, "gathered") for group in groups)) * layout.shard_ranks
    return round(sum(padded_numel(param, layout) * param.gathered for param in unit.parameters))


@lru_cache(CACHED)
def cast_bytes(unit: Unit, layout: Layout) -> int:
    """The shard's copy in the dtype of forward and backward, if it differs from the stored one."""
    if all(param.stored == param.gathered for param in unit.parameters):
        return 0
    if layout.engine is Engine.FSDP1:
        return gathered_bytes(unit, layout) // layout.shard_ranks
    return round(sum(shard_numel(param, layout) * param.gathered for param in unit.parameters))


@lru_cache(CACHED)
def trained_bytes(unit: Unit, layout: Layout, per_element: float, shard: bool) -> int:
    """The trained parameters' elements, whole or as the shard, padding included, times `per_element`."""
    if layout.engine is Engine.FSDP1:
        groups = [group for group in _flat_groups(unit.parameters) if group and any(param.trained for param in group)]
        elements = sum(flat_numel(group, layout) for group in groups)
        return round(elements * (1 if shard else layout.shard_ranks) * per_element)
    numel = shard_numel if shard else padded_numel
    return round(sum(numel(param, layout) for param in unit.parameters if param.trained) * per_element)
