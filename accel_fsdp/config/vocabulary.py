"""The names that an Accelerate YAML and its users give to methods, engines, strategies, dtypes and schedulers."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Literal


class Engine(str, Enum):
    """The engine of a job; the value is its name in JSON, in recorded layouts and in tables of numbers."""

    NONE = "single"
    DDP = "ddp"
    FSDP1 = "fsdp1"
    FSDP2 = "fsdp2"
    DEEPSPEED = "zero"
    TPU = "tpu"

    def __str__(self) -> str:
        return self.value

    @property
    def label(self) -> str:
        """The name in messages."""
        return LABELS[self]


LABELS: Mapping[Engine, str] = {
    Engine.NONE: "one process",
    Engine.DDP: "DDP",
    Engine.FSDP1: "FSDP1",
    Engine.FSDP2: "FSDP2",
    Engine.DEEPSPEED: "DeepSpeed",
    Engine.TPU: "TPU",
}
DISTRIBUTED_TYPES: Mapping[Engine, str] = {
    Engine.NONE: "NO",
    Engine.DDP: "MULTI_GPU",
    Engine.FSDP1: "FSDP",
    Engine.FSDP2: "FSDP",
    Engine.DEEPSPEED: "DEEPSPEED",
    Engine.TPU: "XLA",
}
"""Values of `distributed_type`; that of DDP is the one for GPUs."""
DDP_TYPES = tuple(f"MULTI_{device}" for device in ("CPU", "GPU", "NPU", "MLU", "SDAA", "MUSA", "XPU", "HPU", "NEURON"))
"""Values of `distributed_type` for DDP on any device."""
MULTI_CPU = DDP_TYPES[0]
Method = Literal["full", "lora", "qlora"]
Embeddings = Literal["", "none", "shared"]
"""Why Accelerate can't make units of a model's embedding and head under FSDP2."""
EngineName = Literal["fsdp", "ddp", "deepspeed", "tpu", "single"]
"""The wizard's `--engine`; the version of FSDP is a separate question."""
OTHER_ENGINES: Mapping[EngineName, Engine] = {
    "ddp": Engine.DDP,
    "deepspeed": Engine.DEEPSPEED,
    "tpu": Engine.TPU,
    "single": Engine.NONE,
}
"""The wizard's engines other than FSDP."""
FSDP_VERSIONS = {1: Engine.FSDP1, 2: Engine.FSDP2}
ENGINE_NAMES: Mapping[Engine, EngineName] = {
    **{engine: name for name, engine in OTHER_ENGINES.items()},
    **dict.fromkeys(FSDP_VERSIONS.values(), "fsdp"),
}
MigrationTarget = Literal["fsdp1", "fsdp2", "zero1", "zero2", "zero3"]
"""Values of `migrate --to`: a version of FSDP, or a stage of ZeRO."""
WrapPolicy = Literal["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"]
StateDictType = Literal["SHARDED_STATE_DICT", "FULL_STATE_DICT"]
Precision = Literal["bf16", "fp16", "no"]
STRATEGIES: dict[int, str] = {
    1: "FULL_SHARD",
    2: "SHARD_GRAD_OP",
    3: "NO_SHARD",
    4: "HYBRID_SHARD",
    5: "HYBRID_SHARD_ZERO2",
}
"""Accelerate's numbers and names (`FSDP_SHARDING_STRATEGY` in accelerate.utils.constants, 1-based)."""
TORCH_STRATEGIES = {f"_{STRATEGIES[5]}": STRATEGIES[5]}
"""Names of torch's enumeration (`torch.distributed.fsdp.ShardingStrategy`) that differ, which Accelerate takes too."""
STATE_DICT_TYPES = {"1": "FULL_STATE_DICT", "2": "LOCAL_STATE_DICT", "3": "SHARDED_STATE_DICT"}
"""torch's numbers (`torch.distributed.fsdp.StateDictType`), which Accelerate takes in place of the names."""
HYBRID = ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""Copies of the model, one on each machine, sharded inside of it."""
RESHARDS = {"FULL_SHARD": True, "HYBRID_SHARD": True, "SHARD_GRAD_OP": False, "HYBRID_SHARD_ZERO2": False}
"""FSDP1's strategies as FSDP2's `fsdp_reshard_after_forward`; FSDP2 has no NO_SHARD, which is plain DDP."""
ZERO_STAGES = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "HYBRID_SHARD": 3, "HYBRID_SHARD_ZERO2": 2}
"""The ZeRO stage with the same sharding; a hybrid strategy shards inside each machine, ZeRO over all ranks."""
ZERO_TWINS = {stage: name for name, stage in ZERO_STAGES.items() if name not in HYBRID}
"""A stage as FSDP1's strategy over all ranks. FSDP has no name for stage 1, which shards only optimizer state."""
LONG_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""Short names of dtypes, as torch names them."""
TORCH_DTYPES = {**{short: LONG_DTYPES[short] for short in ("bf16", "fp16")}, "no": LONG_DTYPES["fp32"]}
"""Accelerate's `mixed_precision` as torch names the dtype."""
DTYPES = ("float32", "bfloat16", "float16")
"""The dtypes of loaded and exported weights."""
LOW_DTYPES = ("bfloat16", "float16")
ANY_FSDP, ANY_ZERO = "FSDP", "ZeRO"
"""The common names of FSDP's versions and of DeepSpeed's stages."""
DEFAULT_ZERO_STAGE = 2
"""The stage that Accelerate's launcher takes if `zero_stage` is missing."""


def zero_name(stage: object) -> str:
    return f"{ANY_ZERO}-{stage}"


def deepspeed_name(stage: object) -> str:
    return f"{Engine.DEEPSPEED.label} {zero_name(stage)}"


TARGETS: Mapping[MigrationTarget, str] = {
    "fsdp1": Engine.FSDP1.label,
    "fsdp2": Engine.FSDP2.label,
    "zero1": deepspeed_name(1),
    "zero2": deepspeed_name(2),
    "zero3": deepspeed_name(3),
}
"""Values of `migrate --to`, and their labels."""
EXPERT_FIELD = "expert_parallel_size"
EXPERT_FLAG = f"--{EXPERT_FIELD}"
"""The flag of `train/sft.py` for experts, which Accelerate has no key for."""
SchedulerWord = Literal["slurm", "kubernetes", "skypilot", "torchrun"]


@dataclass(frozen=True)
class Scheduler:
    """`submit` is the command that takes its job file.

    `takes` are the flags of `accel-fsdp script` that this scheduler supports, and some others don't.

    `places`: whether `accel-fsdp launch` reads a machine's number and the first machine's address from the scheduler's
    variables. Otherwise the user gives them.
    """

    title: str
    submit: str
    places: bool = True
    takes: frozenset[str] = frozenset()


SCHEDULERS: Mapping[SchedulerWord, Scheduler] = {
    "slurm": Scheduler("SLURM", "sbatch"),
    "kubernetes": Scheduler("Kubernetes", "kubectl create -f", takes=frozenset({"--image"})),
    "skypilot": Scheduler("SkyPilot", "sky jobs launch", takes=frozenset({"--image", "--spot"})),
    "torchrun": Scheduler("torchrun", "bash", places=False),
}
PLACING = [scheduler.title for scheduler in SCHEDULERS.values() if scheduler.places]


def schedulers_taking(flag: str) -> list[str]:
    return [word for word, scheduler in SCHEDULERS.items() if flag in scheduler.takes]
