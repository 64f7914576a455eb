"""The frozen values that pass between modules. Imports nothing from this package."""

from dataclasses import dataclass
from typing import Literal

Method = Literal["full", "lora", "qlora"]
EngineName = Literal["fsdp", "ddp", "deepspeed", "tpu"]
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


@dataclass(frozen=True)
class LayerClass:
    """A module class that occurs in the model, with how often and its parameters in one instance."""

    name: str
    count: int
    parameters: int


@dataclass(frozen=True)
class ModelFacts:
    """What was read from a model built on the meta device (no weights are loaded).

    `wrap_classes` are the transformer layer classes to give FSDP; empty when none was found. `classes` are all module
    classes that exist in the built model, so that a name can be checked. `persistent_buffers` counts the buffers that
    checkpoints store, such as router biases: FSDP2's RAM-efficient loading can't handle them in accelerate 1.15.
    `origin` says where the facts come from when the model was not built here.
    """

    name: str
    model_type: str
    parameters: int
    wrap_classes: tuple[LayerClass, ...]
    wrap_reason: str
    classes: frozenset[str]
    largest_layer_parameters: int
    persistent_buffers: int = 0
    origin: str = ""


@dataclass(frozen=True)
class MachineFacts:
    """One machine that will train, found here or described; `accelerator` is None for a machine without any.

    `memory_gib` is the memory of one accelerator, None where it is not known.
    """

    accelerator: str | None
    count: int
    memory_gib: float | None = None


@dataclass(frozen=True)
class Answers:
    """One complete set of answers, in the order of the questions: everything that decides the YAML."""

    model: str
    method: Method
    gpus: str
    num_machines: int
    engine: EngineName
    fsdp_version: int
    strategy: int
    zero_stage: int
    wrap_policy: WrapPolicy
    layer_class: tuple[str, ...]
    min_num_params: int
    cpu_offload: bool
    activation_checkpointing: bool
    state_dict_type: StateDictType
    ram_efficient_loading: bool
    mixed_precision: Precision
    num_processes: int
    main_process_ip: str
    main_process_port: int
