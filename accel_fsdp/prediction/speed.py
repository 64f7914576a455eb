"""How long one optimizer step takes, and what bounds it. Pure: no torch, microseconds per layout.

The step is the sum over units of the longer of computing it and sending for it, because engines prefetch one unit,
plus the optimizer. Computing is matrix products at the GPU's `efficiency`, and the elementwise kernels between them at
the speed of its memory.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from accel_fsdp.hardware import Gpu
from accel_fsdp.models import state_bytes
from accel_fsdp.prediction import communication
from accel_fsdp.prediction.amounts import Amounts
from accel_fsdp.prediction.communication import GatheredUnit, Traffic
from accel_fsdp.prediction.memory import (
    Block,
    Layout,
    ModelShape,
    OptimizerName,
    Parameter,
    Recipe,
    compute_bytes,
    master_bytes,
)
from accel_fsdp.units import about_gb

Bound = Literal["compute", "intra-node", "inter-node", "pcie"]

HBM_EFFICIENCY = 0.8
"""Share of the datasheet's bandwidth that streaming kernels reach."""
LINK_EFFICIENCY = 0.75
"""Share of a link's one-way datasheet rate that NCCL's rings reach on large messages (nccl-tests, bus bandwidth)."""
ELEMENTWISE_PASSES = 2.5
"""How often elementwise kernels pass over what matrix products read and wrote; calibrated, one value for all."""
LOSS_BYTES_PER_LOGIT = 30
"""Float32 copy (2 + 4), log-softmax (4 + 4), its gradient (4 + 4), back to half (4 + 2), and the product's write."""
ATTENTION_EFFICIENCY = 0.4
"""What attention kernels reach of what matrix products reach, causal FLOPs counted once and backward as twice forward.

Calibrated on the first version of flash attention: with later ones long sequences run faster than predicted."""
HOST_BYTES_PER_S = 100e9
"""Memory of one machine's host, shared by its ranks, where offloading runs the optimizer: an assumption."""
LATENCY_SECONDS = 50e-6
"""Of a collective however small, per log2 of the ranks and once for its launch; calibrated on FSDP1 with LoRA."""
ACCESSES: dict[OptimizerName, float] = {
    "adamw_torch_fused": 7,
    "adamw_torch": 20,
    "adamw_8bit": 4,
    "adafactor": 6,
    "sgd": 3,
}
"""How often one optimizer step reads or writes each trained element: fused Adam reads p, g, m, v and writes p, m, v."""
RANGE = (0.85, 1.35)
"""Shortest and longest step as multiples of the prediction: 9 of 10 published runs lie between."""


@dataclass(frozen=True)
class Step:
    """One optimizer step: the expected time with its (shortest, longest), and what follows from it.

    `mfu` is the share of the peak in the compute dtype that useful work takes: recomputing doesn't count, and with
    LoRA neither do weight gradients that nobody needs. `assumptions` are sentences, most important first.
    """

    step_seconds: float
    range_seconds: tuple[float, float]
    tokens_per_s_per_gpu: float
    mfu: float
    bound: Bound
    assumptions: tuple[str, ...]


@dataclass(frozen=True)
class Work(Amounts):
    """What one GPU computes: FLOPs of matrix products and of attention, bytes that elementwise kernels move."""

    matmul_flops: float = 0
    attention_flops: float = 0
    elementwise_bytes: float = 0

    @property
    def flops(self) -> float:
        """All products."""
        return self.matmul_flops + self.attention_flops


@dataclass(frozen=True)
class Stretch:
    """A stretch of the model: what it computes and sends in one micro-batch, `count` times in the model.

    `alone` counts adapter weights that are gathered alone, in front of products too short to hide them.
    """

    count: int
    forward: Work
    backward: Work
    recompute: Work
    gather: Traffic
    gathers: float
    reduce: Traffic
    alone: int


def step_time(shape: ModelShape, recipe: Recipe, layout: Layout, gpu: Gpu) -> Step:
    """Predicts one optimizer step of one rank; all ranks do the same."""
    pieces = tuple(_pieces(shape, recipe, layout))
    reducing = communication.reduces_per_step(recipe, layout)
    spent: dict[Bound, float] = {"compute": 0, "intra-node": 0, "inter-node": 0, "pcie": 0}
    for times, reduces in ((reducing, True), (recipe.accumulation - reducing, False)):
        for piece in pieces:
            for bound, seconds in _phases(piece, reduces, recipe, layout, gpu):
                spent[bound] += seconds * piece.count * times
    for bound, seconds in _update(shape, recipe, layout, gpu):
        spent[bound] += seconds
    total = sum(spent.values())
    tokens = recipe.rows * recipe.length * recipe.accumulation
    useful = useful_flops(shape, recipe) * recipe.accumulation
    return Step(
        step_seconds=total,
        range_seconds=(total * RANGE[0], total * RANGE[1]),
        tokens_per_s_per_gpu=tokens / total,
        mfu=useful / total / peak_flops(recipe, gpu),
        bound=max(spent, key=lambda bound: spent[bound]),
        assumptions=tuple(_assumptions(shape, recipe, layout, gpu)),
    )


@dataclass(frozen=True)
class UnitSeconds:
    """Forward and backward of one unit in one micro-batch, each as long as the longer of computing and sending."""

    forward: float
    backward: float


def unit_seconds(
    shape: ModelShape, recipe: Recipe, layout: Layout, gpu: Gpu, reduces: bool
) -> tuple[tuple[UnitSeconds, ...], UnitSeconds]:
    """Each unit of `communication.units`, then the head's product and the loss; with the reduction of gradients or not.

    A unit that stands for several layers is counted once.
    """
    spent = []
    for piece in _pieces(shape, recipe, layout):
        forward, *rest = (seconds for _, seconds in _phases(piece, reduces, recipe, layout, gpu))
        spent.append(UnitSeconds(forward, sum(rest)))
    return tuple(spent[:-1]), spent[-1]


def update_seconds(shape: ModelShape, recipe: Recipe, layout: Layout, gpu: Gpu) -> float:
    """The optimizer's part of a step."""
    return sum(seconds for _, seconds in _update(shape, recipe, layout, gpu))


def useful_flops(shape: ModelShape, recipe: Recipe) -> float:
    """What MFU counts of one micro-batch: all products of forward and backward, none of what is computed again."""
    works = [(len(block.layers), *block_work(block, shape, recipe)) for block in shape.blocks]
    works.append((1, *_head_work(shape, recipe)))
    return sum((forward.flops + backward.flops) * count for count, forward, backward in works)


def peak_flops(recipe: Recipe, gpu: Gpu) -> float:
    """FLOP/s in the compute dtype; a GPU without bf16 does it at the rate of float32."""
    if compute_bytes(recipe) == state_bytes.MASTER or (_is_bf16(recipe) and not gpu.has_bf16):
        return gpu.fp32_flops
    return gpu.half_flops


def work_seconds(work: Work, recipe: Recipe, gpu: Gpu) -> float:
    """Time of `work` on one GPU."""
    flops = work.matmul_flops + work.attention_flops / ATTENTION_EFFICIENCY
    computing = flops / (peak_flops(recipe, gpu) * gpu.efficiency)
    return computing + work.elementwise_bytes / (gpu.hbm_bytes_per_s * HBM_EFFICIENCY)


def sending_seconds(sent: Traffic, ranks: int, gpu: Gpu) -> tuple[Bound, float]:
    """Time of one collective, whose links work at once, and the slowest of them."""
    seconds: dict[Bound, float] = {
        "intra-node": sent.intra_bytes / (gpu.link_bytes_per_s * LINK_EFFICIENCY),
        "inter-node": sent.inter_bytes / (gpu.network_bytes_per_s * LINK_EFFICIENCY),
        "pcie": sent.pcie_bytes / (gpu.pcie_bytes_per_s * LINK_EFFICIENCY),
    }
    bound = max(seconds, key=lambda name: seconds[name])
    return bound, seconds[bound] + _latency_seconds(ranks) * (seconds[bound] > 0)


def block_work(block: Block, shape: ModelShape, recipe: Recipe) -> tuple[Work, Work]:
    """Forward and backward of one block for one micro-batch.

    A product of `n` weights is 2n FLOPs per token forward and 4n backward: gradients of its input and of its weight,
    of which frozen weights need the first alone.
    """
    tokens = recipe.rows * recipe.length
    used = sum(one.numel * _share(one, shape) for one in block.parameters if one.kind in ("linear", "experts"))
    unit = GatheredUnit(block.parameters, False, block)
    adapters = 0 if recipe.method == "full" else communication.trained_numel(unit, recipe)
    attention = Work(attention_flops=4 * shape.heads * shape.head_dim * _keys(block, shape, recipe) * tokens)
    between = Work(elementwise_bytes=_elementwise_bytes(block, shape, recipe) * tokens)
    whole = Work(matmul_flops=2 * used * tokens)
    thin = Work(matmul_flops=2 * adapters * tokens)
    unpacking = Work(elementwise_bytes=_unpacked_bytes(unit, recipe))
    backward = whole.times(2 if recipe.method == "full" else 1) + thin.times(2) + (attention + between).times(2)
    return whole + thin + attention + between + unpacking, backward + unpacking


def _head_work(shape: ModelShape, recipe: Recipe) -> tuple[Work, Work]:
    """The product with the vocabulary and the loss; a tied head computes as one of its own."""
    tokens = recipe.rows * recipe.length
    product = Work(matmul_flops=2 * shape.vocab * shape.hidden * tokens)
    loss = Work(elementwise_bytes=LOSS_BYTES_PER_LOGIT / 2 * shape.vocab * tokens)
    return product + loss, product.times(2 if recipe.method == "full" else 1) + loss


def _pieces(shape: ModelShape, recipe: Recipe, layout: Layout) -> Iterator[Stretch]:
    """The units with their work, and the head, which is a unit of its own or part of the root."""
    for unit in communication.units(shape, layout):
        forward, backward = block_work(unit.block, shape, recipe) if unit.block else (Work(), Work())
        again = _recomputed(forward, unit, shape, recipe)
        gathers = communication.gathers_per_step(unit, recipe, layout) / recipe.accumulation
        gather, reduce = communication.gather(unit, recipe, layout), communication.reduce(unit, recipe, layout)
        alone = communication.gathered_alone(unit, recipe, layout)
        yield Stretch(unit.count, forward, backward, again, gather, gathers, reduce, alone)
    yield Stretch(1, *_head_work(shape, recipe), Work(), Traffic(), 0, Traffic(), 0)


def _phases(piece: Stretch, reduces: bool, recipe: Recipe, layout: Layout, gpu: Gpu) -> Iterator[tuple[Bound, float]]:
    """Forward and backward of a piece, each as long as the longer of computing it and sending for it."""
    before = min(piece.gathers, 1)
    after = piece.gather.times(piece.gathers - before) + (piece.reduce if reduces else Traffic())
    backward = piece.recompute + piece.backward
    for work, sent in ((piece.forward, piece.gather.times(before)), (backward, after)):
        computing = work_seconds(work, recipe, gpu)
        bound, sending = sending_seconds(sent, layout.ranks, gpu)
        yield (bound, sending) if sending > computing else ("compute", computing)
    link: Bound = "intra-node" if layout.ranks <= layout.ranks_per_node else "inter-node"
    yield link, piece.alone * (piece.gathers + reduces) * _latency_seconds(layout.ranks)


def _update(shape: ModelShape, recipe: Recipe, layout: Layout, gpu: Gpu) -> Iterator[tuple[Bound, float]]:
    """The optimizer, bound by the memory that holds its states, and what it sends afterwards; nothing hides them."""
    elements = communication.all_trained_numel(shape, recipe, layout) / layout.shard_ranks
    moved = elements * ACCESSES[recipe.optimizer] * master_bytes(recipe, layout)
    if layout.offload:
        yield "pcie", moved * min(layout.ranks, layout.ranks_per_node) / HOST_BYTES_PER_S
    else:
        yield "compute", moved / (gpu.hbm_bytes_per_s * HBM_EFFICIENCY)
    yield sending_seconds(communication.update(shape, recipe, layout), layout.ranks, gpu)


def _recomputed(forward: Work, unit: GatheredUnit, shape: ModelShape, recipe: Recipe) -> Work:
    """What checkpointing computes again: the forward pass, up to a block's last product if it isn't reentrant.

    Nothing saved for backward comes after the input of that product (torch.utils.checkpoint's early stop). Selective
    checkpointing computes half of the products again, and no attention.
    """
    products = [one for one in unit.parameters if unit.block and one.kind in ("linear", "experts")]
    if recipe.checkpointing == "none" or not products:
        return Work()
    if recipe.checkpointing == "selective":
        return Work(forward.matmul_flops / 2, 0, forward.elementwise_bytes)
    last = products[-1].numel * _share(products[-1], shape) * (recipe.checkpointing == "full")
    return forward + Work(matmul_flops=-2 * last * recipe.rows * recipe.length)


def _latency_seconds(ranks: int) -> float:
    return LATENCY_SECONDS * (1 + math.log2(ranks))


def _share(one: Parameter, shape: ModelShape) -> float:
    """Which share of a parameter one token goes through."""
    return shape.experts_used / shape.experts if one.kind == "experts" and shape.experts else 1


def _keys(block: Block, shape: ModelShape, recipe: Recipe) -> float:
    """How many keys a token attends to on average: half of all, fewer in a window; eager attention computes all.

    Where sliding and full layers alternate the first layer slides, as in Gemma 2 and 3 and gpt-oss.
    """
    if recipe.attention == "eager" or shape.eager_only:
        return recipe.length
    slides = shape.window and 0 in block.layers
    window = min(shape.window, recipe.length) if slides else recipe.length
    return window - window**2 / (2 * recipe.length)


def _elementwise_bytes(block: Block, shape: ModelShape, recipe: Recipe) -> float:
    """Bytes per token of the kernels between products: they read what one wrote and write what the next reads."""
    ends = sum(
        sum(one.shape[-2:]) * _share(one, shape) * math.prod(one.shape[:-2])
        for one in block.parameters
        if one.kind in ("linear", "experts")
    )
    return ELEMENTWISE_PASSES * ends * compute_bytes(recipe)


def _unpacked_bytes(unit: GatheredUnit, recipe: Recipe) -> float:
    """What unpacking 4-bit weights for one use reads and writes."""
    if recipe.method != "qlora":
        return 0
    packed = sum(one.numel for one in unit.parameters if communication.is_quantized(one, unit))
    return packed * (state_bytes.NF4_BYTES + compute_bytes(recipe))


def _is_bf16(recipe: Recipe) -> bool:
    return recipe.precision == "bf16" or (recipe.precision == "no" and recipe.dtype == "bfloat16")


def _assumptions(shape: ModelShape, recipe: Recipe, layout: Layout, gpu: Gpu) -> Iterator[str]:
    if silent := sum(len(shape.blocks[index].layers) for index in shape.untraced):
        yield f"Rows hold text only: the {silent} layers for images are held and not run."
    if not gpu.calibrated:
        yield f"No public run calibrates {gpu.name}: products are taken to reach {gpu.efficiency:.0%} of its peak."
    if layout.ranks > layout.ranks_per_node:
        yield f"The network gives each GPU {about_gb(gpu.network_bytes_per_s)}/s."
    if layout.offload:
        yield f"Each host's memory streams {about_gb(HOST_BYTES_PER_S)}/s for the optimizer."
    if _is_bf16(recipe) and not gpu.has_bf16:
        yield f"{gpu.name} has no bf16 units and computes it at the rate of float32; --precision fp16 is faster."
    if compute_bytes(recipe) == state_bytes.MASTER:
        yield "Float32 products run without TF32, torch's default."
    yield "Kernels are PyTorch's own, not compiled; reading data takes no time, and sequences have no padding."
