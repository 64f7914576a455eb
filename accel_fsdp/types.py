"""The frozen values that pass between modules. Imports nothing from this package."""

import ast
import math
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
STATE_DICT_TYPES = {"1": "FULL_STATE_DICT", "2": "LOCAL_STATE_DICT", "3": "SHARDED_STATE_DICT"}
"""torch's numbers (`torch.distributed.fsdp.StateDictType`), which Accelerate takes in place of the names."""
RESHARDS = {"FULL_SHARD": True, "HYBRID_SHARD": True, "SHARD_GRAD_OP": False, "HYBRID_SHARD_ZERO2": False}
"""FSDP1's strategies as FSDP2's `fsdp_reshard_after_forward`; FSDP2 has no NO_SHARD, which is plain DDP."""
TORCH_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "no": "float32"}
"""Accelerate's `mixed_precision` as torch names the dtype."""
LOW_DTYPES = ("bfloat16", "float16")


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

    `dtype` is what the weights load in when nothing else is asked for, empty if unknown. `tied` says that the config
    ties the embeddings, `tied_apart` that the weights hold both all the same and they differ. `kept_bf16` and
    `kept_fp16` name a parameter that stays float32 when the rest loads in that dtype, empty if none does.
    `expert_classes` are classes of single experts in a list of experts, `declared_classes` what `_no_split_modules`
    names. `quantized` is the bits of a bitsandbytes checkpoint's weights, 0 if it is none, `quant_storage` their dtype.
    `quant_method` is how a checkpoint's weights are quantised and stay so, such as gptq; empty if they aren't.
    `auto_class` is the class of transformers that trains it.
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
    dtype: str = ""
    tied: bool = False
    tied_apart: bool = False
    kept_bf16: str = ""
    kept_fp16: str = ""
    expert_classes: frozenset[str] = frozenset()
    declared_classes: tuple[str, ...] | None = None
    quantized: int = 0
    quant_storage: str = ""
    quant_method: str = ""
    auto_class: str = "AutoModelForCausalLM"


@dataclass(frozen=True)
class MachineFacts:
    """One machine that will train, found here or described; `accelerator` is None for a machine without any.

    `memory_gib` is the memory of one accelerator, None where it is not known.
    """

    accelerator: str | None
    count: int
    memory_gib: float | None = None


@dataclass(frozen=True)
class HereFacts:
    """What `check --here` sees of this machine without importing torch; bytes are bytes.

    `gpus` counts NVIDIA GPUs, None where another kind of accelerator makes the count say nothing. `visible` is
    CUDA_VISIBLE_DEVICES, None if it isn't set. `memory` is the host's or the container's limit, `free_disk` and
    `filesystem` are the output folder's, None and empty without one. `default_config` is the path of Accelerate's own
    config file where there is one. `port_in_use` is about the file's port. `others_may_read` is the umask's opinion.
    """

    gpus: int | None = None
    visible: str | None = None
    memory: int | None = None
    free_disk: int | None = None
    filesystem: str = ""
    torch_xla: bool = False
    default_config: str = ""
    port_in_use: bool = False
    others_may_read: bool = True

    @property
    def usable_gpus(self) -> int | None:
        """The GPUs that a process started here would see."""
        if self.gpus is None or self.visible is None:
            return self.gpus
        count, numbers = 0, [word.strip() for word in self.visible.split(",")]
        if len(set(numbers)) < len(numbers):
            return 0  # CUDA offers none where one is named twice
        for entry in numbers:
            if not entry or (entry.lstrip("-").isdecimal() and not 0 <= int(entry) < self.gpus):
                break  # CUDA drops the first bad entry and all after it
            count += 1
        return count


@dataclass(frozen=True)
class CheckpointFacts:
    """What a checkpoint or export folder holds, by names, sizes and safetensors headers; nothing is unpickled.

    `sharded` and `full` say in which way model weights are stored, `hub` that there are Hugging Face weights.
    `without_metadata` are sharded folders that lack `.metadata`, `broken` files shorter than their header says.
    `adapter_tensors` is None where there is no adapter file. `empty_tensor` names a tensor without elements.
    `tied_twice` says that a tied model's embeddings are stored twice. `has_config` counts a tokenizer's as well.
    `by_accelerator` says that `Accelerator.save_state` wrote it, which has no `trainer_state.json`.
    """

    name: str
    sharded: bool = False
    full: bool = False
    hub: bool = False
    optimizer: bool = False
    scheduler: bool = False
    trainer_state: bool = False
    rng_states: int = 0
    without_metadata: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()
    adapter_tensors: int | None = None
    empty_tensor: str = ""
    tied_twice: bool = False
    cache_off: bool = False
    architecture: str = ""
    has_config: bool = False
    private: str = ""
    by_accelerator: bool = False

    @property
    def is_checkpoint(self) -> bool:
        """Whether it is a folder to resume from and not an export."""
        return self.sharded or self.full or self.optimizer or self.scheduler or self.trainer_state


@dataclass(frozen=True)
class ScriptFacts:
    """A training script, parsed and not run."""

    name: str
    tree: ast.Module


@dataclass(frozen=True)
class Answers:
    """One complete set of answers, in the order of the questions: everything that decides the YAML.

    What follows from them for the training script comes last: `script_checkpoints` says that it has to checkpoint
    activations, as Accelerate can't, `auto_class` what builds its model.
    """

    model: str
    method: Method
    gpus: str
    num_machines: int
    engine: EngineName
    fsdp_version: int
    strategy: int
    zero_stage: int
    mixed_precision: Precision
    num_processes: int
    wrap_policy: WrapPolicy
    layer_class: tuple[str, ...]
    min_num_params: int
    cpu_offload: bool
    activation_checkpointing: bool
    state_dict_type: StateDictType
    ram_efficient_loading: bool
    main_process_ip: str
    main_process_port: int
    script_checkpoints: bool = False
    auto_class: str = "AutoModelForCausalLM"

    @property
    def own_script(self) -> bool:
        """Whether `train/sft.py`, which trains causal language models, can't train this one."""
        return self.auto_class != "AutoModelForCausalLM"


OptimizerName = Literal["adamw_torch_fused", "adamw_torch", "adamw_8bit", "adafactor", "sgd"]
EngineKind = Literal["fsdp1", "fsdp2", "ddp", "zero", "single"]
Checkpointing = Literal["none", "full", "reentrant", "selective"]
LoraTargets = Literal["all", "attention"]
Attention = Literal["sdpa", "eager", "flash"]
Wide = Literal["none", "norms", "rest"]
Kernels = Literal["none", "liger", "foak"]
Kind = Literal["linear", "experts", "embedding", "head", "norm", "other"]


ATTENTION_LINEAR = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "query_key_value", "c_attn", "Wqkv"})
"""Linear layers of attention, by the names that models give them."""


@dataclass(frozen=True)
class Parameter:
    """One parameter by its full shape. `kind` decides what 4 bits quantise, and LoRA adapts: linear layers."""

    name: str
    shape: tuple[int, ...]
    kind: Kind

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    def is_adapted(self, targets: LoraTargets) -> bool:
        """Whether LoRA adapts it inside of a block: every linear layer, or those of attention alone."""
        return self.kind == "linear" and (
            targets == "all" or self.name.rpartition(".")[0].rpartition(".")[2] in ATTENTION_LINEAR
        )


@dataclass(frozen=True)
class Block:
    """A layer class that repeats: `parameters` of one instance, and where its instances stand among all layers.

    Two blocks may have one class where layers alternate, such as sliding and full attention, or dense and experts.
    """

    name: str
    layers: tuple[int, ...]
    parameters: tuple[Parameter, ...]


@dataclass(frozen=True)
class ModelShape:
    """What memory and time depend on. `outer` are the parameters outside of the blocks: embeddings, last norm, head.

    A tied head has no parameter of its own. `buffers_bytes` are stored or computed buffers, on every rank. `experts`
    and `experts_used` count a layer's experts and those a token goes through, 0 without. `window` is the sliding
    window of the layers that have one, 0 without; `positions` the longest sequence, 0 if unlimited. `untraced` are the
    places of the blocks that images go through, whose activations aren't known. `eager_only`: transformers has no other
    attention for the model.
    """

    name: str
    model_type: str
    hidden: int
    vocab: int
    heads: int
    head_dim: int
    blocks: tuple[Block, ...]
    outer: tuple[Parameter, ...]
    tied: bool
    buffers_bytes: int = 0
    experts: int = 0
    experts_used: int = 0
    window: int = 0
    positions: int = 0
    untraced: tuple[int, ...] = ()
    eager_only: bool = False

    @property
    def layers(self) -> int:
        """How many blocks the model is made of."""
        return sum(len(block.layers) for block in self.blocks)


@dataclass(frozen=True)
class Recipe:
    """How one rank trains: everything besides model and machine that decides memory and time.

    `rows` is the micro-batch of one rank and `length` its sequence length. `precision` is the mixed precision, `dtype`
    that of the loaded weights: float32 masters with bf16 compute are ("bf16", "float32"), pure bf16 is ("no",
    "bfloat16"). `checkpointing` "reentrant" is Trainer's older kind, "selective" keeps attention's output and every
    second product, as torchtitan does. `chunked_loss` never holds all logits at once.
    Trainer drops them before backward, another script may have `keeps_logits`, and one that `zeroes_late` clears the
    last step's gradients only between forward and backward, as Lightning's Trainer does. `reduce` is the dtype in which
    FSDP reduces gradients, which Accelerate makes that of mixed precision.

    `lora_dtype` "base" is PEFT without `autocast_adapter_dtype`. `wide` is what is float32 beside 4-bit weights on one
    GPU: norms with TRL, everything with PEFT's `prepare_model_for_kbit_training` alone. `attention` "flash" is
    flash_attention_2. `kernels` are the fused ones of Trainer's `use_liger_kernel`, or of the "fused ops and kernels"
    plugin of fms-acceleration, foak.
    """

    method: Method = "full"
    precision: Precision = "bf16"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    rows: int = 1
    length: int = 2048
    accumulation: int = 1
    optimizer: OptimizerName = "adamw_torch_fused"
    checkpointing: Checkpointing = "none"
    chunked_loss: bool = False
    keeps_logits: bool = False
    zeroes_late: bool = False
    reduce: Literal["compute", "float32"] = "compute"
    lora_rank: int = 16
    lora_targets: LoraTargets = "all"
    lora_dropout: bool = False
    lora_dtype: Literal["float32", "base"] = "float32"
    wide: Wide = "none"
    attention: Attention = "sdpa"
    kernels: Kernels = "none"

    @property
    def recomputes(self) -> bool:
        """Whether backward computes whole blocks again."""
        return self.checkpointing in ("full", "reentrant")


@dataclass(frozen=True)
class Layout:
    """How the ranks share the model. `engine` and `strategy` as in `STRATEGIES`, or the ZeRO stage for "zero".

    FSDP2 has strategies 1, 2, 4 and 5. `sync_each_batch` reduces gradients after each micro-batch.
    """

    engine: EngineKind
    strategy: int
    ranks: int
    ranks_per_node: int
    offload: bool = False
    sync_each_batch: bool = False

    @property
    def shard_ranks(self) -> int:
        """How many ranks share one copy of the parameters: all, or those of one machine with hybrid sharding."""
        if self.engine in ("ddp", "single") or (self.engine == "fsdp1" and self.strategy == 3):
            return 1
        hybrid = self.engine != "zero" and self.strategy in (4, 5)
        return self.ranks_per_node if hybrid else self.ranks
