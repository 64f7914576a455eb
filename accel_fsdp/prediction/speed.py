"""The duration of one optimizer step, and its bottleneck. Pure: no torch, microseconds per layout.

A step takes, for each unit, the longest of computing, communication and kernel launches, because engines prefetch one
unit; plus the optimizer. Computing is matrix products at the GPU's `efficiency`, and memory traffic at the memory's
bandwidth (`work.py` counts both).
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from accel_fsdp.config import Engine
from accel_fsdp.hardware import Gpu, is_hopper
from accel_fsdp.job import Layout, Recipe
from accel_fsdp.models import optimizers, state_bytes
from accel_fsdp.prediction import communication
from accel_fsdp.prediction.communication import Traffic
from accel_fsdp.prediction.memory import ModelShape, Unit, compute_bytes, master_bytes
from accel_fsdp.prediction.work import UNPACKING_FLOPS, Work, block_work, head_work, recomputed
from accel_fsdp.units import about_gb

Bound = Literal["compute", "intra-node", "inter-node", "pcie"]

HBM_EFFICIENCY = 0.85
"""Share of the datasheet's bandwidth that streaming kernels reach."""
LINK_EFFICIENCY = 0.75
"""Share of a link's one-way datasheet rate that NCCL's rings reach on large messages (nccl-tests, bus bandwidth)."""
PCIE_EFFICIENCY = 0.85
"""Share of PCIe's one-way rate that copies from pinned memory reach: 26 to 27 GB/s of generation 4 with 16 lanes."""
CONTENTION = 0.2
"""Share of a GPU's multiprocessors that NCCL takes from concurrent matrix products: 24 of 108 or 132."""
THREAD_BYTES_PER_S = 12e9
"""Memory bandwidth of one host thread: torchrun gives each rank one (OMP_NUM_THREADS=1)."""
HOST_BYTES_PER_S = 100e9
"""Host memory bandwidth of one machine, shared by its ranks, for an offloaded optimizer: an assumption."""
LATENCY_SECONDS = 20e-6
"""Latency of a collective of any size, per log2 of the ranks and once for its launch."""
CLIPPING = 3
"""How often clipping accesses each gradient: a read for the norm, a read and a write for the scaling."""

# Calibrated, together with the efficiencies of `hardware/gpus.py` and `UNPACKING_FLOPS`, on all rows of
# benchmarks/throughput_accuracy.py, whose --held-out shows the error on sources left out of the calibration.
ATTENTION_EFFICIENCY = 0.68
"""Efficiency of flash attention 2 relative to products; causal FLOPs count once, backward as twice forward."""
OLDER_INSTRUCTIONS = 0.77
"""Its efficiency on Hopper relative to other GPUs: it doesn't use the warp-group instructions (wgmma)."""
LAUNCH_SECONDS = 9e-6
"""Host time per kernel launch: for tiny micro-batches the host is slower than the GPU."""
UNIT_SECONDS = 1.4e-3
"""Host time to gather or reduce one unit of FSDP1, including hooks and streams. It adds up where adapters are separate
units. No published run shows FSDP2's."""
SHORTEST = 0.85
"""Shortest step as a multiple of the prediction: nearly all published runs are above it."""
RANGE = (SHORTEST, 2.0)
"""Shortest and longest step as multiples of the prediction. Published runs of tuned loops end at 1.2; the only three of
`train/sft.py` on a GPU, one H200, took 1.28, 1.66 and 2.0 times the prediction (benchmarks/RESULTS.md)."""


@dataclass(frozen=True)
class Step:
    """One optimizer step: the expected time with its (shortest, longest), and what follows from it.

    `mfu` is the share of the peak in the compute dtype that useful work takes; recomputation and, with LoRA, unused
    weight gradients don't count. `assumptions` are sentences, most important first.
    """

    step_seconds: float
    range_seconds: tuple[float, float]
    tokens_per_s_per_gpu: float
    mfu: float
    bound: Bound
    assumptions: tuple[str, ...]


def step_time(shape: ModelShape, recipe: Recipe, layout: Layout, gpu: Gpu) -> Step:
    """Predicts one optimizer step of one rank of a data-parallel layout; all ranks do the same."""
    assert not layout.is_by_transformers
    units = (*communication.units(shape, recipe, layout), None)
    reducing = communication.reduces_per_step(recipe, layout)
    bound_seconds: dict[Bound, float] = {"compute": 0, "intra-node": 0, "inter-node": 0, "pcie": 0}
    for times, reduces in ((reducing, True), (recipe.accumulation - reducing, False)):
        if times:
            for unit in units:
                for bound, seconds in _phases(unit, reduces, shape, recipe, layout, gpu):
                    bound_seconds[bound] += seconds * (unit.count if unit else 1) * times
    copies = sending_seconds(communication.copied_inputs(shape, recipe), 1, gpu)
    for bound, seconds in (*_update(shape, recipe, layout, gpu), copies):
        bound_seconds[bound] += seconds
    total = sum(bound_seconds.values())
    tokens = recipe.rows * recipe.length * recipe.accumulation
    useful = useful_flops(shape, recipe) * recipe.accumulation
    shortest, longest = RANGE
    return Step(
        step_seconds=total,
        range_seconds=(total * shortest, total * longest),
        tokens_per_s_per_gpu=tokens / total,
        mfu=useful / total / peak_flops(recipe, gpu),
        bound=max(bound_seconds, key=lambda bound: bound_seconds[bound]),
        assumptions=tuple(_assumptions(recipe, layout, gpu)),
    )


def useful_flops(shape: ModelShape, recipe: Recipe) -> float:
    """FLOPs of one micro-batch that MFU counts: all products of forward and backward, without recomputation."""
    recipe = dataclasses.replace(recipe, packed=False)  # what a mask hides isn't useful
    counted = [(len(block.layers), *block_work(block, shape, recipe)) for block in shape.blocks]
    counted.append((1, *head_work(shape, recipe)))
    return sum((forward.flops + backward.flops) * count for count, forward, backward in counted)


def peak_flops(recipe: Recipe, gpu: Gpu) -> float:
    """FLOP/s in the compute dtype; a GPU without bf16 computes it at the rate of float32."""
    if compute_bytes(recipe) == state_bytes.MASTER or (_is_bf16(recipe) and not gpu.has_bf16):
        return gpu.fp32_flops
    return gpu.half_flops


def work_seconds(work: Work, recipe: Recipe, gpu: Gpu) -> float:
    attention = ATTENTION_EFFICIENCY * (OLDER_INSTRUCTIONS if is_hopper(gpu) else 1)
    flops = (work.matmul_flops + work.attention_flops / attention) / peak_flops(recipe, gpu)
    computing = (flops + work.float32_flops / gpu.fp32_flops) / gpu.efficiency
    computing += work.unpacked * UNPACKING_FLOPS / gpu.fp32_flops
    return computing + work.moved_bytes / (gpu.hbm_bytes_per_s * HBM_EFFICIENCY)


def sending_seconds(sent: Traffic, ranks: int, gpu: Gpu) -> tuple[Bound, float]:
    """The slowest link of one collective, and its time; the links work concurrently.

    Where PCIe is the GPUs' only link, host traffic shares it with traffic between GPUs.
    """
    seconds: dict[Bound, float] = {
        "intra-node": sent.intra_bytes / (gpu.link_bytes_per_s * LINK_EFFICIENCY),
        "inter-node": sent.inter_bytes / (gpu.network_bytes_per_s * LINK_EFFICIENCY),
        "pcie": sent.pcie_bytes / (gpu.pcie_bytes_per_s * PCIE_EFFICIENCY),
    }
    if gpu.link_bytes_per_s <= gpu.pcie_bytes_per_s and sent.pcie_bytes:
        seconds["pcie"] += seconds["intra-node"]
    bound = max(seconds, key=lambda name: seconds[name])
    return bound, seconds[bound] + (_latency_seconds(ranks) if seconds[bound] else 0)


def _phases(
    unit: Unit | None, reduces: bool, shape: ModelShape, recipe: Recipe, layout: Layout, gpu: Gpu
) -> Iterator[tuple[Bound, float]]:
    """The times of forward and backward of a unit in one micro-batch, or of the head (None), whose unit comes before.

    Each is the longest of computation, communication and kernel launches. FSDP1 allows two gathered units at a time
    (`limit_all_gathers`). Where adapters are separate units, they take both places, so a block is gathered only after
    the one before it, and communication adds to computation.
    """
    block = unit.block if unit else None
    work = block_work(block, shape, recipe) if block else (Work(), Work())
    gathers, alone, gather, reduce, copied = 0.0, 0, Traffic(), Traffic(), (0.0, 0.0)
    if unit is None:
        work = head_work(shape, recipe)
    else:
        gathers = communication.gathers_per_step(unit, recipe, layout) / recipe.accumulation
        gather, copied = communication.gather(unit, recipe, layout), communication.copied(unit, recipe, layout)
        reduce = communication.reduce(unit, recipe, layout) if reduces else reduce
        alone = communication.gathered_alone(unit, layout)
    before = min(gathers, 1)
    later = gathers - before
    after = gather.times(later) + reduce
    copies = Work(moved_bytes=copied[0]), Work(moved_bytes=copied[1] if reduces else 0)
    forward = work[0] + copies[0].times(before)
    backward = recomputed(work[0], block, shape, recipe) + work[1] + copies[0].times(later) + copies[1]
    gathers_fsdp1 = layout.engine is Engine.FSDP1 and layout.is_sharded and gathers > 0
    hooks = UNIT_SECONDS * (1 + alone) if gathers_fsdp1 else 0
    latency = alone * _latency_seconds(layout.ranks)
    for done, sent, uses in ((forward, gather.times(before), before), (backward, after, later + reduces)):
        computing = work_seconds(done, recipe, gpu) + latency * uses
        launching = done.kernels * LAUNCH_SECONDS + hooks * uses
        bound, sending = sending_seconds(sent, layout.ranks, gpu)
        if alone:  # separately gathered adapter weights come before products too short to hide them
            yield bound, sending
            yield "compute", max(computing, launching - sending)
            continue
        _, collective = sending_seconds(dataclasses.replace(sent, pcie_bytes=0), layout.ranks, gpu)
        longest = max(computing + CONTENTION * min(collective, computing), launching)
        yield (bound, sending) if sending > longest else ("compute", longest)


def _update(shape: ModelShape, recipe: Recipe, layout: Layout, gpu: Gpu) -> Iterator[tuple[Bound, float]]:
    """The optimizer, bound by the memory that holds its states, then its communication; neither is hidden."""
    elements = layout.shard_of(communication.trained_numel(shape, recipe, layout))
    moved = elements * (optimizers.ACCESSES[recipe.optimizer] + CLIPPING) * master_bytes(recipe, layout)
    if layout.offload:
        ranks = min(layout.ranks, layout.ranks_per_node)
        fair = HOST_BYTES_PER_S / ranks
        yield "pcie", moved / min(THREAD_BYTES_PER_S, fair)
    else:
        yield "compute", moved / (gpu.hbm_bytes_per_s * HBM_EFFICIENCY)
    yield sending_seconds(communication.update(shape, recipe, layout), layout.ranks, gpu)


def _latency_seconds(ranks: int) -> float:
    return LATENCY_SECONDS * (1 + math.log2(ranks))


def _is_bf16(recipe: Recipe) -> bool:
    return recipe.precision == "bf16" or (recipe.precision == "no" and recipe.dtype == "bfloat16")


def _assumptions(recipe: Recipe, layout: Layout, gpu: Gpu) -> Iterator[str]:
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
    if recipe.masks_documents:
        yield "With --packing, sdpa takes a mask, whose kernel may take longer than predicted."
    yield "Kernels are PyTorch's own, not compiled; reading data takes no time, and sequences have no padding."
