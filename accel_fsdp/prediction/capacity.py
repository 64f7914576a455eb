"""Converts allocated bytes to the needs of device, host and disk: ranges if the public figures are ranges. Pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from accel_fsdp.config import Engine
from accel_fsdp.hardware import Gpu, gpus
from accel_fsdp.job import Job, Layout
from accel_fsdp.models import state_bytes
from accel_fsdp.prediction.memory import (
    ModelShape,
    Prediction,
    Reservation,
    Tapes,
    predict,
    reserve,
    shards,
    variant_for,
)
from accel_fsdp.units import GIB

CONTEXT_BYTES = round(0.6 * GIB)
"""CUDA context and kernels: 0.47 (lazy, the default) to 0.92 GiB on A100 (stas00, ml-engineering); 0.6 to 0.8 beyond
the reserved memory of one A100 (nvidia-smi, fms-acceleration's PowerLM and Mistral runs)."""
PAIR_BYTES, COMMUNICATOR_BYTES = round(0.6 * GIB), round(1.4 * GIB)
"""NCCL's memory for two ranks joined by NVLink, and for more: 1.1 to 1.5 GiB with the context for two A100
(fms-acceleration), 1 to 2 GiB for eight (stas00: 0.55 -> 2.00 GiB after a barrier)."""
PCIE_BYTES = round(0.2 * GIB)
"""NCCL's memory over PCIe, with few channels: two RTX 4090 ran with 22.7 of 23.6 GiB reserved
(Answer.AI, fsdp_qlora)."""
NVLINK_BYTES_PER_S = 100e9
RESERVED: dict[str, tuple[float, float, float]] = {
    "single": (1.02, 1.15, 1.45),
    "ddp": (1.02, 1.15, 1.45),
    "fsdp1": (1.02, 1.20, 1.60),
    "fsdp2": (1.02, 1.15, 1.45),
    "zero": (1.05, 1.00, 1.40),
}
"""Reserved over allocated memory, least, usual and most, without a replay of the allocator: if it fits in any case
or can't fit, or for many candidates. The usual ratio decides then; for DeepSpeed, whose blocks aren't modelled, the
allocated bytes do. In between `reserve` decides."""
REPLAY_RANGE = (0.93, 1.10)
"""Measured reserved bytes over replayed ones: 9 of 10 published runs are in between."""
MARGIN = 0.05
"""The share of the memory that must stay free."""
WORKSPACE_BYTES = 2 * 8_519_680
"""cuBLAS's workspaces of the forward and the backward thread, which the allocator counts: 4096 KiB x 2 and 16 KiB x 8
each (torch, `CUDABlas.cpp`, `parseChosenWorkspaceSize`)."""
HOPPER_WORKSPACE_BYTES = 2 * 33_554_432
"""The workspace on compute capability 9.0: 4096 KiB x 8."""

Verdict = Literal["yes", "expandable", "tight", "no"]
EXPANDABLE_SEGMENTS = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
EXPANDABLE = "=".join(*EXPANDABLE_SEGMENTS.items())
NEEDS_EXPANDABLE = f"so only with {EXPANDABLE}"
"""The explanation of the verdict "expandable"."""


def outside_bytes(gpu: Gpu | None, ranks: int) -> int:
    """The memory of CUDA and NCCL on each GPU, outside PyTorch's allocator."""
    if ranks == 1:
        return CONTEXT_BYTES
    if gpu is not None and gpu.link_bytes_per_s < NVLINK_BYTES_PER_S:
        return CONTEXT_BYTES + PCIE_BYTES
    return CONTEXT_BYTES + (PAIR_BYTES if ranks == 2 else COMMUNICATOR_BYTES)


def workspace_bytes(gpu: Gpu | None) -> int:
    """The memory of cuBLAS on this GPU, or on most if unknown."""
    return HOPPER_WORKSPACE_BYTES if gpu is not None and gpus.is_hopper(gpu) else WORKSPACE_BYTES


def predicted(shape: ModelShape, tapes: Mapping[str, Tapes], job: Job, gpu: Gpu | None) -> Prediction:
    """The allocated memory of one rank on this GPU, shared by plan, wizard and a run's report."""
    chosen = tapes[variant_for(job.recipe, job.layout)]
    return _remembered(shape, chosen, job.recipe, job.layout, workspace_bytes(gpu))


_remembered = lru_cache(4096)(predict)  # a search asks for the same prediction several times


@dataclass(frozen=True)
class Device:
    """One rank's needs of its GPU: the allocator's reserved bytes and the driver's total, as ranges.

    `capacity` are the bytes of the GPU, `outside` those of CUDA and NCCL outside the allocator. `replayed` are the
    reserved bytes of the allocator's replay, 0 without one. `runs_out` is the phase in which memory runs out, or may.
    """

    allocated: int
    reserved: tuple[int, int]
    verdict: Verdict
    outside: int
    capacity: int
    replayed: int = 0
    runs_out: str = ""

    @property
    def used(self) -> tuple[int, int]:
        """The memory in use as the driver reports it, in bytes: the least and the most."""
        low, high = self.reserved
        return low + self.outside, high + self.outside

    @property
    def fits(self) -> bool:
        """Whether the rank fits with the margin, if need be with expandable segments."""
        return self.verdict in ("yes", "expandable")

    @property
    def environment(self) -> Mapping[str, str]:
        """The environment variables that the rank needs to fit."""
        return EXPANDABLE_SEGMENTS if self.verdict == "expandable" else {}

    @property
    def needed(self) -> int:
        """The minimum: the allocated bytes, and those of CUDA and NCCL outside the allocator."""
        return self.allocated + self.outside


Replay = Callable[[bool, int], Reservation]
"""Plays the steps into an allocator: with expandable segments or without, and the bytes that it can get."""


@lru_cache(256)
def replay_of(shape: ModelShape, tapes: Tapes, job: Job, workspace_bytes: int) -> Replay:
    """Returns a function that replays the allocator for one job, and caches the results.

    If a GPU has room for all reserved memory, the result without a limit is reused. Expandable segments are replayed
    each time, because their addresses depend on the GPU's size.
    """
    reservations: dict[tuple[bool, int], Reservation] = {}
    unlimited: list[Reservation] = []

    def replayed(expandable: bool, room_bytes: int) -> Reservation:
        if not expandable and unlimited and unlimited[0].reserved <= room_bytes:
            return unlimited[0]
        if (expandable, room_bytes) not in reservations:
            arguments = (job.recipe, job.layout, workspace_bytes, expandable, room_bytes)
            reservations[expandable, room_bytes] = reservation = reserve(shape, tapes, *arguments)
            if not expandable and not reservation.met_limit:
                unlimited.append(reservation)
        return reservations[expandable, room_bytes]

    return replayed


def spared_bytes(capacity_bytes: int) -> int:
    """The usable part of a GPU's memory, without the margin."""
    return round(capacity_bytes / (1 + MARGIN))


def device(
    prediction: Prediction,
    layout: Layout,
    capacity_bytes: int,
    gpu: Gpu | None,
    replay: Replay | None = None,
    unusual: bool = False,
) -> Device:
    """Whether a rank fits: allocated memory, context, communicators, the 5 % margin, and fragmentation.

    `prediction` is for a step with rows of one length; for an `unusual` job, with evaluation or varied rows, only the
    replay decides.

    Without `replay` the usual fragmentation is assumed. The allocator frees cached blocks before memory runs out, so
    they count only if they can't be freed. To find that out, the allocator is replayed on a GPU of that size.
    """
    allocated, outside = prediction.peak.total, outside_bytes(gpu, layout.ranks)
    room, limit = capacity_bytes - outside, spared_bytes(capacity_bytes) - outside
    low, expected, high = (round(allocated * factor) for factor in RESERVED[layout.engine])
    reserved = (min(low, max(room, allocated)), min(high, max(room, allocated)))
    phase = prediction.peak.phase
    if allocated > room:
        return Device(allocated, reserved, "no", outside, capacity_bytes, runs_out=phase)
    if allocated > limit or (replay is None and expected > limit):
        return Device(allocated, reserved, "tight", outside, capacity_bytes, runs_out=phase)
    if replay is None or not layout.is_replayed or (high <= limit and not unusual):
        return Device(allocated, reserved, "yes", outside, capacity_bytes)
    return _replay_verdict(Device(allocated, reserved, "yes", outside, capacity_bytes), replay, limit)


def _replay_verdict(device: Device, replay: Replay, spared: int) -> Device:
    """The verdict of the allocator's replay: fits with the 5 % margin, with expandable segments, or without margin."""
    room = device.capacity - device.outside
    plain = reservation = replay(False, spared)
    verdict: Verdict = "yes"
    if plain.failed_at or plain.thrashes:
        reservation = replay(True, spared)
        verdict = "expandable"
        if reservation.failed_at:
            reservation = replay(True, room)
            verdict = "no" if reservation.failed_at else "tight"
    low, high = replayed_range(reservation.reserved, room)
    runs_out = "" if verdict == "yes" else plain.failed_at or plain.thrashes
    reserved = (max(low, device.allocated), high)
    return replace(device, reserved=reserved, verdict=verdict, replayed=reservation.reserved, runs_out=runs_out)


def replayed_range(reserved: int, room: int) -> tuple[int, int]:
    """The least and the most that an allocator reserves of `room`, given its replay's reservation."""
    low, high = (min(round(reserved * factor), max(room, reserved)) for factor in REPLAY_RANGE)
    return low, high


@dataclass(frozen=True)
class Host:
    """Peak bytes of one machine's memory in each phase, and bytes of its disk."""

    loading: int
    offload: int
    gathering: int
    staging: int
    checkpoint: int
    export: int

    @property
    def training(self) -> int:
        """The bytes needed to load the model and to train it."""
        return max(self.loading, self.offload)


def host(shape: ModelShape, job: Job, ram_efficient: bool = True) -> Host:
    """Host memory and disk of the first machine.

    Loading: the whole model, on rank 0 with RAM-efficient loading, else on each of the machine's ranks. Offload: pinned
    parameters, gradients and optimizer state of each rank's shard. Gathering: the full state dict. Staging: copies of
    the machine's shards of a checkpoint that is written in the background. A sharded checkpoint has the parameters as
    stored, only the adapters' if there are any, and the optimizer's state; DeepSpeed's also has copies of the weights.
    An adapter is exported as it was trained.
    """
    recipe, layout = job.recipe, job.layout
    loads_once = ram_efficient or layout.is_by_transformers  # transformers reads only each rank's part
    loaders = 1 if layout.is_fsdp and loads_once else layout.ranks_per_node
    master = shards.master_bytes(recipe, layout)

    single_rank = replace(layout, ranks=1, ranks_per_node=1, tensor=1, experts=1)
    stored, optimizer, trained = shards.resting_bytes(shape, recipe, single_rank)
    weights = trained if recipe.method != "full" else stored
    own_stored, own_optimizer, own_trained = shards.resting_bytes(shape, recipe, layout)
    own_weights = own_trained if recipe.method != "full" else own_stored
    forward = trained * shards.compute_bytes(recipe) // master
    stage = layout.strategy if layout.engine is Engine.DEEPSPEED else None
    return Host(
        loading=shape.numel * state_bytes.DTYPE_BYTES[recipe.dtype] * loaders,
        offload=(own_stored + own_optimizer + own_trained) * layout.ranks_per_node if layout.offload else 0,
        gathering=stored if layout.is_fsdp else 0,
        staging=(own_weights + own_optimizer) * layout.ranks_per_node if layout.is_fsdp else 0,
        checkpoint=state_bytes.checkpoint_bytes(weights, optimizer, zero_stage=stage, forward=forward),
        export=trained if recipe.method != "full" else shape.numel * shards.compute_bytes(recipe),
    )
