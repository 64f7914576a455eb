"""The variables of torchrun and `accelerate launch` for this rank; only this module reads them."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Generic, TypeVar

EXPORTED = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "ACCEL_FSDP_MESH")
"""Beginnings of the variables through which Accelerate passes the YAML to the ranks."""
CHANGE_RESULTS = (
    *(*EXPORTED, "CUBLAS_", "CUDNN_", "TORCHINDUCTOR_", "DS_", "LIGER_", "TRITON_", "NVTE_", "XLA_", "MKL_CBWR"),
    *("NVIDIA_TF32_OVERRIDE", "NCCL_ALGO", "NCCL_PROTO", "ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE"),
)
"""Beginnings of the variables that change results, or which collectives a rank calls."""
STACKS = "ACCEL_FSDP_STACKS"
"""The variable with the folder in which ranks leave their stacks for `accel-fsdp launch`."""
HANG_TIMEOUT = "ACCEL_FSDP_HANG_TIMEOUT"
"""The variable in which `accel-fsdp launch --hang-timeout` passes its seconds to the ranks."""
USE_CPU = "ACCELERATE_USE_CPU"
"""The variable in which Accelerate passes `use_cpu` to the ranks."""
MESH = "ACCEL_FSDP_MESH"
"""The variable by which `train/sft.py` notes over which mesh transformers, and not Accelerate, shards the model."""
TENSOR_AXIS, EXPERT_AXIS = "tp", "ep"
"""Names that transformers gives the dimensions of such a mesh."""
EXPANDABLE_SEGMENTS = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
"""The variable that every launch on GPUs sets: PyTorch's allocator then maps more memory at the end of one segment
instead of leaving gaps between many. The planner's verdicts assume it."""
ALLOCATOR_VARIABLES = (*EXPANDABLE_SEGMENTS, "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""The allocator's variable under each of its names."""
OFFLOAD_DEVICES = ("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE")


T = TypeVar("T")


class _Variable(Generic[T]):
    """A property of `LaunchEnvironment`: the value of a variable or its default, converted by `read`."""

    def __init__(self, name: str, read: Callable[[str], T], default: str) -> None:
        self.name, self.read, self.default = name, read, default

    def __get__(self, launch: "LaunchEnvironment", owner: type) -> T:
        return self.read(launch.variables.get(self.name, self.default))


def _number(name: str, default: int = 0) -> _Variable[int]:
    return _Variable(name, int, str(default))


def _text(name: str, default: str = "") -> _Variable[str]:
    return _Variable(name, str, default)


def _switch(name: str, default: str = "false") -> _Variable[bool]:
    return _Variable(name, _is_on, default)


def _is_on(word: str) -> bool:
    """Whether Accelerate reads this word as true."""
    from accelerate.utils import str_to_bool

    try:
        return bool(str_to_bool(word.lower()))
    except ValueError:
        return False


@dataclass(frozen=True)
class LaunchEnvironment:
    """The variables at one moment; `cpu` and `preflight` set some of them for the libraries."""

    variables: Mapping[str, str]

    @classmethod
    def now(cls) -> "LaunchEnvironment":
        return cls(dict(os.environ))

    # This rank's place, as torchrun sets it

    is_rank = _Variable("LOCAL_RANK", lambda rank: int(rank) >= 0, "-1")
    """Whether torchrun or `accelerate launch` started this process as one rank of a job."""
    rank = _number("RANK")
    local_rank = _number("LOCAL_RANK")
    world_size = _number("WORLD_SIZE", 1)
    machines = _number("GROUP_WORLD_SIZE", 1)
    machine_rank = _number("GROUP_RANK")
    main_address = _text("MASTER_ADDR", "127.0.0.1")
    main_port = _number("MASTER_PORT")
    restarts = _number("TORCHELASTIC_RESTART_COUNT")
    """The number of times that torchrun has restarted the ranks."""
    may_restart = _Variable("TORCHELASTIC_MAX_RESTARTS", lambda most: int(most) > 0, "0")
    """Whether torchrun starts the ranks again when one has failed, or machines come or go (`--max-restarts`)."""
    has_store = _Variable("TORCHELASTIC_USE_AGENT_STORE", lambda word: word == "True", "")
    """Whether the launcher holds the store at which ranks meet, so that no rank has to."""
    error_file = _text("TORCHELASTIC_ERROR_FILE")
    """The file in which torch's launcher looks for a rank's error; empty if unset."""
    stacks_folder = _text(STACKS)
    """Where this rank leaves its stacks if it is ended; empty if unset."""
    hang_timeout = _Variable(HANG_TIMEOUT, float, "0")
    """Seconds after which a rank that hangs is ended; 0: never."""

    @property
    def local_world_size(self) -> int:
        return int(self.variables.get("LOCAL_WORLD_SIZE", self.world_size))

    @property
    def restarts_meet_in_one_store(self) -> bool:
        """Whether restarted ranks find the keys of their predecessors in the store (torch 2.13, c10d rendezvous)."""
        return self.may_restart and self.has_store

    # The YAML, as Accelerate exports it

    mixed_precision = _text("ACCELERATE_MIXED_PRECISION", "no")
    uses_cpu = _switch(USE_CPU)
    uses_deepspeed = _switch("ACCELERATE_USE_DEEPSPEED")
    by_accelerate = _switch("ACCELERATE_USE_FSDP")
    by_transformers = _Variable(MESH, bool, "")
    """Whether transformers shards the model, with tensor or expert parallelism, and Accelerate doesn't."""
    sharding_strategy = _Variable("FSDP_SHARDING_STRATEGY", str.upper, "")
    state_dict_type = _text("FSDP_STATE_DICT_TYPE")
    layer_classes = _Variable("FSDP_TRANSFORMER_CLS_TO_WRAP", lambda names: tuple(filter(None, names.split(","))), "")
    """The names of the classes to wrap; empty: those that the model declares."""
    ignores_modules = _Variable("FSDP_IGNORED_MODULES", bool, "")
    loads_on_rank_zero = _switch("FSDP_CPU_RAM_EFFICIENT_LOADING")
    recomputes_units = _switch("FSDP_ACTIVATION_CHECKPOINTING")
    keeps_original_parameters = _switch("FSDP_USE_ORIG_PARAMS", default="true")
    syncs_module_states = _switch("FSDP_SYNC_MODULE_STATES")

    @property
    def has_config(self) -> bool:
        """Whether Accelerate's launcher read a YAML for this rank."""
        return "ACCELERATE_MIXED_PRECISION" in self.variables

    @property
    def settings(self) -> dict[str, str]:
        return {name: value for name, value in sorted(self.variables.items()) if name.startswith(EXPORTED)}

    @property
    def uses_fsdp(self) -> bool:
        return self.by_accelerate or self.by_transformers

    @property
    def shards(self) -> bool:
        return self.uses_fsdp or self.uses_deepspeed

    @property
    def uses_fsdp1(self) -> bool:
        return self.uses_fsdp and not self.uses_fsdp2

    @property
    def uses_fsdp2(self) -> bool:
        return self.uses_fsdp and self.variables.get("FSDP_VERSION") == "2"

    @property
    def wraps_layer_classes(self) -> bool:
        policy = self.variables.get("FSDP_AUTO_WRAP_POLICY", "").upper()
        return self.by_accelerate and policy == "TRANSFORMER_BASED_WRAP"

    @property
    def offloads(self) -> bool:
        """Whether parameters or optimizer states are offloaded to the host's memory."""
        devices = (self.variables.get(name, "none") for name in OFFLOAD_DEVICES)
        return _is_on(self.variables.get("FSDP_OFFLOAD_PARAMS", "")) or any(device != "none" for device in devices)

    @property
    def mesh(self) -> dict[str, int]:
        """The sizes of `parallelism_config` that are more than 1, by name; with transformers also `ep`."""
        if self.by_transformers:
            pairs = (word.split("=") for word in self.variables[MESH].split())
            return {name: int(size) for name, size in pairs if int(size) > 1}
        names = ("DP_REPLICATE", "DP_SHARD", "TP", "CP", "SP")
        sizes = {name.lower(): int(self.variables.get(f"PARALLELISM_CONFIG_{name}_SIZE", "1")) for name in names}
        return {name: size for name, size in sizes.items() if size > 1}

    def with_rows(self, of_ranks: Sequence[T]) -> Sequence[T]:
        """The values of ranks with different rows: one rank of each tensor, context or sequence parallel group."""
        return of_ranks[:: prod(size for name, size in self.mesh.items() if name in ("tp", "cp", "sp"))]
