"""The wizard's answers as one frozen value, and those so far with the model and the machine. Pure."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from accel_fsdp.config import (
    AXES,
    DEFAULT_ZERO_STAGE,
    FSDP_VERSIONS,
    HYBRID,
    OTHER_ENGINES,
    STRATEGIES,
    Engine,
    EngineName,
    Method,
    Precision,
    StateDictType,
    WrapPolicy,
    size_key,
)
from accel_fsdp.hardware import MachineFacts, machines
from accel_fsdp.job import FSDP_KINDS
from accel_fsdp.models import ModelFacts

MESH = ("dp_replicate", "tp", "ep")
"""The answers that are sizes of FSDP2's mesh."""


@dataclass(frozen=True)
class Answers:
    """A complete set of answers, in the order of the questions: everything that decides the YAML.

    The defaults stand for what a file leaves open.
    Consequences for the training script come last: `script_checkpoints` says that it has to checkpoint activations,
    because Accelerate can't, `auto_class` names its model class. `seq_len` and `batch` are the tokens of a row and one
    GPU's rows, None and 0 if memory can't be predicted. `dp_replicate`, `tp` and `ep` are sizes of FSDP2's mesh:
    replicas, 0 for one on each machine, and ranks that divide layers and experts.
    """

    model: str = ""
    method: Method = "full"
    gpus: str = "cpu"
    num_machines: int = 1
    engine: EngineName = "fsdp"
    fsdp_version: int = 2
    strategy: int = 1
    zero_stage: int = DEFAULT_ZERO_STAGE
    mixed_precision: Precision = "no"
    num_processes: int = 0
    wrap_policy: WrapPolicy = "TRANSFORMER_BASED_WRAP"
    layer_class: tuple[str, ...] = ()
    min_num_params: int = 100_000_000
    cpu_offload: bool = False
    activation_checkpointing: bool = False
    state_dict_type: StateDictType = "SHARDED_STATE_DICT"
    ram_efficient_loading: bool = True
    main_process_ip: str = ""
    main_process_port: int = 0
    seq_len: int | None = None
    activation_offload: bool = False
    batch: int = 0
    script_checkpoints: bool = False
    auto_class: str = "AutoModelForCausalLM"
    dp_replicate: int = 0
    tp: int = 1
    ep: int = 1

    @property
    def place(self) -> Literal["", "rank", "scheduler"]:
        """What has to give a machine's rank: nothing, the user, or a scheduler such as SLURM and its address."""
        return "" if self.num_machines == 1 else "rank" if self.main_process_ip else "scheduler"

    @property
    def mesh(self) -> dict[str, int]:
        """The sizes of `parallelism_config` under FSDP2, by key; empty if it has no mesh."""
        replicas = (self.dp_replicate or self.num_machines) if STRATEGIES[self.strategy] in HYBRID else 1
        if replicas == 1 and self.tp == 1 and STRATEGIES[self.strategy] not in HYBRID:
            return {}
        sizes = (replicas, self.num_processes // (replicas * self.tp), *((self.tp,) if self.tp > 1 else ()))
        return dict(zip(map(size_key, AXES), sizes, strict=False))

    @property
    def own_script(self) -> bool:
        """Whether `train/sft.py`, which trains causal language models, can't train this one."""
        return self.auto_class != "AutoModelForCausalLM"


def engine_of(answers: Mapping[str, Any]) -> Engine:
    """The engine of answers that may be incomplete; NONE while the version of FSDP is open."""
    if answers.get("engine") != "fsdp":
        return OTHER_ENGINES.get(answers.get("engine", "ddp"), Engine.DDP)
    if answers.get("fsdp_version") == 2 and answers.get("strategy") == 3:
        return Engine.DDP  # FSDP2 has no NO_SHARD: it would shard
    return FSDP_VERSIONS.get(answers.get("fsdp_version", 0), Engine.NONE)


@dataclass(frozen=True)
class Context:
    """The context of a question: the answers so far, the model, and the machine that was found.

    `model` is None if its facts are unknown. `wished` are flags and other given answers, of later questions too.
    """

    given: Mapping[str, Any]
    detected: MachineFacts = machines.CPU
    model: ModelFacts | None = None
    wished: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def engine(self) -> Engine:
        return engine_of(self.given)

    @property
    def is_fsdp(self) -> bool:
        return self.engine in FSDP_KINDS

    @property
    def machine(self) -> MachineFacts:
        """One of the machines that will train, as answered; before that, the one that was found."""
        return machines.parse(self.given["gpus"])[0] if "gpus" in self.given else self.detected

    def __getitem__(self, name: str) -> Any:
        return self.given[name]
