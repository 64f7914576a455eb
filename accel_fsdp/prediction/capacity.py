"""Converts allocated bytes to the needs of device, host and disk. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from accel_fsdp.config import Engine
from accel_fsdp.hardware import Gpu, gpus
from accel_fsdp.job import Job, Layout
from accel_fsdp.models import state_bytes
from accel_fsdp.prediction.memory import ModelShape, Prediction, Tapes, predict, shards, variant_for
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
MARGIN = 0.05
"""The memory that must stay free, as a share of what is needed. With expandable segments the allocator reserved 1.004
times the allocated peak at the median of 56 simulated jobs, 1.045 times at most."""
FRAGMENTED = 1.2
"""Reserved over allocated memory without expandable segments, as on AMD's GPUs. Simulated jobs reserved 1.13 to
1.48 times their peak, but the allocator frees cached blocks before memory runs out: of 140 published runs that ran
out without expandable segments, 138 had at most 1.18 times their peak (two, unexplained, had 1.29 and 1.31)."""
WORKSPACE_BYTES = 2 * 8_519_680
"""cuBLAS's workspaces of the forward and the backward thread, which the allocator counts: 4096 KiB x 2 and 16 KiB x 8
each (torch, `CUDABlas.cpp`, `parseChosenWorkspaceSize`)."""
HOPPER_WORKSPACE_BYTES = 2 * 33_554_432
"""The workspace on compute capability 9.0: 4096 KiB x 8."""

Verdict = Literal["yes", "tight", "no"]


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
    """One rank's needs of its GPU, in bytes.

    `capacity` are the bytes of the GPU, `outside` those of CUDA and NCCL outside the allocator. `runs_out` is the phase
    in which memory runs out, or may.
    """

    allocated: int
    verdict: Verdict
    outside: int
    capacity: int
    runs_out: str = ""

    @property
    def fits(self) -> bool:
        return self.verdict == "yes"

    @property
    def needed(self) -> int:
        """The allocated bytes, and those of CUDA and NCCL outside the allocator."""
        return self.allocated + self.outside


def device(
    prediction: Prediction, layout: Layout, capacity_bytes: int, gpu: Gpu | None, expandable: bool | None = None
) -> Device:
    """Whether a rank fits: allocated memory, context, communicators, and the margin.

    Every launch sets `expandable` segments where the GPU has them.
    """
    allocated, outside = prediction.peak.total, outside_bytes(gpu, layout.ranks)
    room, phase = capacity_bytes - outside, prediction.peak.phase
    if expandable is None:
        expandable = gpu is None or gpu.has_expandable_segments
    with_margin = (allocated + outside) * (1 + MARGIN) if expandable else allocated * FRAGMENTED + outside
    if with_margin <= capacity_bytes:
        return Device(allocated, "yes", outside, capacity_bytes)
    return Device(allocated, "tight" if allocated <= room else "no", outside, capacity_bytes, phase)


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
    parameters, gradients and optimizer state of each rank's shard, and the inputs of layers. Gathering: the full state
    dict. Staging: copies of the machine's shards of a checkpoint that is written in the background. A sharded
    checkpoint has the parameters as stored, only the adapters' if there are any, and the optimizer's state; DeepSpeed's
    also has copies of the weights. An adapter is exported as it was trained.
    """
    recipe, layout = job.recipe, job.layout
    # FSDP2 can't fill stored buffers from rank 0, and 4-bit weights are quantised on every rank
    fills = layout.engine is not Engine.FSDP2 or not shape.stored_buffers
    loads_once = ram_efficient and fills and recipe.method != "qlora"
    loads_once = loads_once or layout.is_by_transformers  # transformers reads only each rank's part
    loaders = 1 if layout.is_fsdp and loads_once else layout.ranks_per_node
    master = shards.master_bytes(recipe, layout)

    single_rank = replace(layout, ranks=1, ranks_per_node=1, tensor=1, experts=1)
    stored, optimizer, trained = shards.resting_bytes(shape, recipe, single_rank)
    own_stored, own_optimizer, own_trained = shards.resting_bytes(shape, recipe, layout)
    weights, own_weights = (stored, own_stored) if recipe.method == "full" else (trained, own_trained)
    inputs = recipe.rows * recipe.length * shape.hidden * shards.compute_bytes(recipe) * shape.depth
    kept = own_stored + own_optimizer + own_trained if layout.offload else 0
    forward = trained * shards.compute_bytes(recipe) // master
    stage = layout.strategy if layout.engine is Engine.DEEPSPEED else None
    return Host(
        loading=shape.numel * state_bytes.DTYPE_BYTES[recipe.dtype] * loaders,
        offload=(kept + inputs * recipe.has_inputs_on_host) * layout.ranks_per_node,
        gathering=stored if layout.is_fsdp else 0,
        staging=(own_weights + own_optimizer) * layout.ranks_per_node if layout.is_fsdp else 0,
        checkpoint=state_bytes.checkpoint_bytes(weights, optimizer, zero_stage=stage, forward=forward),
        export=trained if recipe.method != "full" else shape.numel * shards.compute_bytes(recipe),
    )
