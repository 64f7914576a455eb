"""The wizard's answers as one frozen value."""

from dataclasses import dataclass

from accel_fsdp.config import (
    AXES,
    DEFAULT_ZERO_STAGE,
    HYBRID,
    STRATEGIES,
    EngineName,
    Method,
    Precision,
    StateDictType,
    WrapPolicy,
    size_key,
)

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
    def needs_engine(self) -> bool:
        """Whether only a cluster engine, such as SLURM, can give the rendezvous address."""
        return self.num_machines > 1 and not self.main_process_ip

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
