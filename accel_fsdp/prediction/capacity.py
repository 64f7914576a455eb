"""From allocated bytes to what a device, a host and a disk need: ranges where the public figures are ranges. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from accel_fsdp.hardware import Gpu
from accel_fsdp.models import state_bytes
from accel_fsdp.prediction.memory import (
    Layout,
    ModelShape,
    Prediction,
    Recipe,
    Tapes,
    idle_units,
    predict,
    shards,
    units_of,
    variant_of,
)
from accel_fsdp.units import GIB

CONTEXT_BYTES = round(0.9 * GIB)
"""CUDA context with kernels loaded: 0.47 (lazy) to 0.92 GiB, A100, torch 2.1 (stas00, ml-engineering)."""
COMMUNICATOR_BYTES = round(1.5 * GIB)
"""NCCL's buffers and channels after the first collective: 1 to 2 GiB (stas00: 0.55 -> 2.00 GiB after a barrier)."""
RESERVED: dict[str, tuple[float, float]] = {
    "single": (1.02, 1.15),
    "ddp": (1.02, 1.20),
    "fsdp1": (1.05, 1.50),
    "fsdp2": (1.05, 1.37),
    "zero": (1.05, 1.40),
}
"""Reserved over allocated: public pairs give 1.20 to 1.37 for FSDP2 and 1.12 to 1.36 for FSDP1 without
`expandable_segments`, less with it (torchtitan, fms-acceleration, Answer.AI's fsdp_qlora, where FSDP1 reserves up to
1.48 of what is predicted); the lower ends leave room for rounding alone."""
MARGIN = 0.05
"""What must stay free to call it a fit."""
WORKSPACE_BYTES = 2 * 8_519_680
"""cuBLAS's workspaces of the forward and the backward thread, which the allocator counts: 4096 KiB x 2 and 16 KiB x 8
each (torch, `CUDABlas.cpp`, `parseChosenWorkspaceSize`)."""
HOPPER_WORKSPACE_BYTES = 2 * 33_554_432
"""The same on compute capability 9.0: 4096 KiB x 8."""

Verdict = Literal["yes", "tight", "no"]


def workspace_bytes(gpu: Gpu | None) -> int:
    """What cuBLAS holds on this GPU, or on most where it isn't known."""
    hopper = gpu is not None and gpu.name.startswith(("H100", "H200", "GH200"))
    return HOPPER_WORKSPACE_BYTES if hopper else WORKSPACE_BYTES


def predicted(
    shape: ModelShape, tapes: Mapping[str, Tapes], recipe: Recipe, layout: Layout, gpu: Gpu | None
) -> Prediction:
    """What one rank allocates on this GPU: plan, wizard and a run's report ask here, and show the same number."""
    return predict(shape, tapes[variant_of(recipe, layout.engine)], recipe, layout, workspace_bytes(gpu))


@dataclass(frozen=True)
class Device:
    """What one rank needs of its GPU: the allocator's reserved bytes and all that the driver counts, as ranges."""

    allocated: int
    reserved: tuple[int, int]
    used: tuple[int, int]
    verdict: Verdict
    outside: int

    @property
    def needed(self) -> int:
        """What must be there: the allocated bytes, and what CUDA and NCCL hold outside of the allocator."""
        return self.allocated + self.outside


def device(prediction: Prediction, layout: Layout, capacity_bytes: int) -> Device:
    """Whether a rank fits: allocated + context + communicator + 5 % must.

    Blocks that the allocator reserved and doesn't use are freed before it fails, so they don't count against a fit.
    """
    allocated = prediction.peak.total
    outside = CONTEXT_BYTES + (COMMUNICATOR_BYTES if layout.ranks > 1 else 0)
    low, high = (round(allocated * factor) for factor in RESERVED[layout.engine])
    most = max(capacity_bytes - outside, allocated)
    reserved = (min(low, most), min(high, most))
    needed = allocated + outside
    verdict: Verdict = (
        "no" if needed > capacity_bytes else "yes" if needed * (1 + MARGIN) <= capacity_bytes else "tight"
    )
    return Device(allocated, reserved, (reserved[0] + outside, reserved[1] + outside), verdict, outside)


@dataclass(frozen=True)
class Host:
    """Bytes of one machine's memory at its fullest in each phase, and of its disk."""

    loading: int
    offload: int
    gathering: int
    checkpoint: int
    export: int


def host(shape: ModelShape, recipe: Recipe, layout: Layout, ram_efficient: bool = True) -> Host:
    """Host memory and disk of the first machine.

    Loading: the whole model on rank 0 where loading is RAM-efficient, on each of the machine's ranks where not.
    Offload: pinned parameters, gradients and optimizer state of each rank's shard. Gathering: the full state dict.
    A sharded checkpoint holds the parameters as stored, of adapters these alone, and the optimizer's state; DeepSpeed's
    also copies of the weights. An adapter is exported as it was trained.
    """
    loaders = 1 if layout.is_fsdp and ram_efficient else layout.ranks_per_node
    units = (*units_of(shape, recipe, layout), *idle_units(shape, recipe, layout))
    master = shards.master_bytes(recipe, layout)

    def total(layout: Layout) -> tuple[int, int, int]:
        sizes = [
            (
                shards.shard_bytes(unit, layout),
                shards.optimizer_bytes(unit, recipe, layout),
                shards.trained_bytes(unit, layout, master, shard=True),
            )
            for unit in units
        ]
        held, optimizer, trained = (sum(column) for column in zip(*sizes, strict=True))
        return held, optimizer, trained

    alone = replace(layout, ranks=1, ranks_per_node=1)
    held, optimizer, trained = total(alone)
    weights = trained if recipe.method != "full" else held
    forward = trained * shards.compute_bytes(recipe) // master
    stage = layout.strategy if layout.engine == "zero" else None
    return Host(
        loading=model_numel(shape) * state_bytes.DTYPE_BYTES[recipe.dtype] * loaders,
        offload=sum(total(layout)) * layout.ranks_per_node if layout.offload else 0,
        gathering=held if layout.is_fsdp else 0,
        checkpoint=state_bytes.checkpoint_bytes(weights, optimizer, zero_stage=stage, forward=forward),
        export=trained if recipe.method != "full" else model_numel(shape) * shards.compute_bytes(recipe),
    )


def model_numel(shape: ModelShape) -> int:
    """All parameters of the model."""
    inside = sum(len(block.layers) * sum(one.numel for one in block.parameters) for block in shape.blocks)
    return inside + sum(one.numel for one in shape.outer)
