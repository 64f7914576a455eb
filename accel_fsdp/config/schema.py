"""Every key that Accelerate 1.15 reads from a YAML for DDP, FSDP1, FSDP2, DeepSpeed and TPU: the one list of them.

Pure data. Questions, flags, checks, documentation and the tests against Accelerate's parser all read this table. What
"reads" means was taken from `accelerate launch` (commands/launch.py, utils/launch.py) and the plugins it feeds
(utils/dataclasses.py).
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial
from typing import Any

from accel_fsdp.config.vocabulary import DDP_TYPES, STRATEGIES, TORCH_STRATEGIES, ZERO_TWINS, Engine


class Kind(Enum):
    """The type of a value; the value is how it is shown."""

    BOOL = "true or false"
    INT = "a whole number"
    FLOAT = "a number"
    TEXT = "text"
    CHOICE = "one of a list"
    NAMES = "names joined by commas, without spaces"
    SECTION = "a section of keys"


TRUE_WORDS = ("true", "yes", "on", "y", "t", "1")
"""The words that Accelerate's `str_to_bool` reads as true."""
FALSE_WORDS = ("false", "no", "off", "n", "f", "0")
DEFAULT_PORT = 29500
"""The default port of machine 0, where several machines meet."""
FSDP = frozenset({Engine.FSDP1, Engine.FSDP2})
ONLY1, ONLY2 = frozenset({Engine.FSDP1}), frozenset({Engine.FSDP2})
DS, XLA = frozenset({Engine.DEEPSPEED}), frozenset({Engine.TPU})
MESHES = frozenset({Engine.FSDP2, Engine.DDP})
GPU = FSDP | DS | {Engine.DDP}
ALL = frozenset(Engine)
EXACT = frozenset({
    "compute_environment", "distributed_type", "parallelism_config_cp_backend", "parallelism_config_sp_backend",
    "parallelism_config_cp_comm_strategy", "deepspeed_multinode_launcher", "dynamo_mode", "fp8_backend",
    "fp8_opt_level",
})  # fmt: skip
"""Keys whose values Accelerate takes in this case only; the values of others it turns into upper or lower case."""
NUMBERED = {
    "fsdp_state_dict_type": ("1", "2", "3"),
    "fsdp_backward_prefetch": ("1", "2"),
    "fsdp_sharding_strategy": tuple(TORCH_STRATEGIES),
}
"""Keys that also take the numbers, or other names, of torch's enumeration."""


@dataclass(frozen=True)
class Field:
    """One key. `section` is the mapping it is in, empty for the top level; `default` the value when it is absent.

    `meanings` are the values to choose from, each with its consequence. A key with no `engines` is accepted and never
    used. `question` is how the wizard asks for it, empty where it doesn't.
    """

    key: str
    kind: Kind
    default: Any
    engines: frozenset[Engine]
    help: str
    meanings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    question: str = ""
    section: str = ""

    def takes(self, text: str) -> bool:
        """Whether text is one of the choices, ignoring case where Accelerate does."""
        if self.key in EXACT:
            return text in self.choices
        if text.upper() in NUMBERED.get(self.key, ()):
            return True
        return text.lower() in [choice.lower() for choice in self.choices]

    def accepts(self, value: Any) -> bool:
        """Whether Accelerate can read a value, as far as the kind of the key shows."""
        if self.kind is Kind.BOOL:
            return str(value).lower() in TRUE_WORDS + FALSE_WORDS
        if self.kind is Kind.CHOICE:
            return self.takes(str(value))
        return self.kind is not Kind.INT or isinstance(value, int)

    @property
    def choices(self) -> tuple[str, ...]:
        return tuple(self.meanings)


def _any_of(*choices: str) -> Mapping[str, str]:
    return dict.fromkeys(choices, "")


_fsdp = partial(Field, section="fsdp_config")


def _mesh(name: str, kind: Kind, default: Any, help: str, *choices: str, engines: frozenset[Engine] = ONLY2) -> Field:
    section = "parallelism_config"
    return Field(f"{section}_{name}", kind, default, engines, help, _any_of(*choices), section=section)


def _deepspeed(key: str, kind: Kind, help: str, meanings: Mapping[str, str] = _any_of(), question: str = "") -> Field:
    return Field(key, kind, None, DS, help, meanings, question, "deepspeed_config")


def _xla(name: str, kind: Kind, help: str) -> Field:
    """Nothing in Accelerate reads these: `TrainingArguments.fsdp_config` does, under the same names."""
    help += " Accelerate passes it on to nothing; TrainingArguments(fsdp_config=...) gives it to Trainer."
    return _fsdp(f"fsdp_{name}", kind, False, XLA, help)


def _extra(key: str, kind: Kind, default: Any, help: str, *choices: str) -> Field:
    return Field(key, kind, default, ALL, help, _any_of(*choices), section=f"{key.partition('_')[0]}_config")


STRATEGY_CHOICES = _any_of(*STRATEGIES.values(), *(str(number) for number in STRATEGIES))
DEVICES = _any_of("none", "cpu", "nvme")

TOP: tuple[Field, ...] = (
    Field("compute_environment", Kind.CHOICE, "LOCAL_MACHINE", ALL, "Where it runs.",
          _any_of("LOCAL_MACHINE", "AMAZON_SAGEMAKER")),
    Field("distributed_type", Kind.CHOICE, None, ALL, "The engine. FSDP covers both versions, DDP is MULTI_GPU.",
          _any_of("NO", *DDP_TYPES, "DEEPSPEED", "FSDP", "XLA", "MEGATRON_LM")),
    Field("mixed_precision", Kind.CHOICE, "no", ALL, "Compute precision over float32 master weights. bf16 halves the "
          "memory of gathered parameters and activations; no trains in the dtype the model was loaded in.",
          {"bf16": "Ampere and newer, TPU", "fp16": "older GPUs, with loss scaling", "no": "fp32 throughout",
           "fp8": "Hopper and newer, with an fp8_config"},
          "Which precision?"),
    Field("num_processes", Kind.INT, -1, ALL, "Ranks in total, over all machines: one per GPU.",
          question="How many processes in total (one per GPU, over all machines)?"),
    Field("num_machines", Kind.INT, 1, ALL, "Machines that take part; num_processes is divided by it.",
          question="How many machines?"),
    Field("machine_rank", Kind.INT, 0, ALL, "This machine's number, 0 to num_machines - 1. Differs per machine, so it "
          "belongs on the command line: --machine_rank."),
    Field("main_process_ip", Kind.TEXT, None, GPU, "Address of machine 0, for several machines.",
          question="Address of the first machine?"),
    Field("main_process_port", Kind.INT, None, GPU,
          f"Port of machine 0 ({DEFAULT_PORT} if absent; 0 picks a free one).",
          question="Port of the first machine?"),
    Field("gpu_ids", Kind.TEXT, "all", GPU, "GPUs to use as text such as '0,1'; replaces CUDA_VISIBLE_DEVICES."),
    Field("main_training_function", Kind.TEXT, "main", XLA, "The script's function that a TPU process calls."),
    Field("use_cpu", Kind.BOOL, False, ALL, "Trains on the CPU, under NO and MULTI_CPU alone."),
    Field("debug", Kind.BOOL, False, ALL, "Checks shapes before each collective; slow."),
    Field("downcast_bf16", Kind.TEXT, False, XLA, "On TPU, double tensors become bf16 too."),
    Field("fsdp_config", Kind.SECTION, {}, FSDP, "The FSDP keys."),
    Field("deepspeed_config", Kind.SECTION, {}, DS, "The DeepSpeed keys."),
    Field("parallelism_config", Kind.SECTION, {}, ONLY2, "The device mesh of FSDP2."),
    Field("dynamo_config", Kind.SECTION, {}, ALL, "torch.compile."),
    Field("fp8_config", Kind.SECTION, {}, ALL, "FP8 recipes, with mixed_precision: fp8."),
    Field("megatron_lm_config", Kind.SECTION, {}, frozenset(), "Megatron-LM, which this tool does not cover."),
    Field("mpirun_config", Kind.SECTION, {}, frozenset(), "mpirun for CPU clusters, which this tool does not cover."),
    Field("rdzv_backend", Kind.TEXT, "static", frozenset(), "Only --rdzv_backend on the command line has an effect."),
    Field("same_network", Kind.BOOL, False, frozenset(), "Only --same_network on the command line has an effect."),
    Field("enable_cpu_affinity", Kind.BOOL, False, frozenset(),
          "Only --enable_cpu_affinity on the command line has an effect."),
    Field("tpu_name", Kind.TEXT, None, XLA, "Name of the TPU pod."),
    Field("tpu_zone", Kind.TEXT, None, XLA, "Zone of the TPU pod."),
    Field("tpu_use_cluster", Kind.BOOL, False, XLA, "Runs on a TPU pod."),
    Field("tpu_use_sudo", Kind.BOOL, False, XLA, "Runs the script with sudo on each host of the pod."),
    Field("tpu_vm", Kind.TEXT, None, XLA, "VM names of the pod."),
    Field("tpu_env", Kind.TEXT, None, XLA, "Environment variables for the pod's hosts."),
    Field("commands", Kind.TEXT, None, XLA, "Commands to run on the pod's hosts first."),
    Field("command_file", Kind.TEXT, None, XLA, "File of commands to run on the pod's hosts first."),
)  # fmt: skip

FSDP_FIELDS: tuple[Field, ...] = (
    _fsdp("fsdp_version", Kind.CHOICE, 1, FSDP, "1: FullyShardedDataParallel, 2: fully_shard. Absent means 1.",
          {"2": "fully_shard, per-parameter sharding (recommended)", "1": "FullyShardedDataParallel"},
          question="Which FSDP?"),
    _fsdp("fsdp_sharding_strategy", Kind.CHOICE, "FULL_SHARD", ONLY1, "What is sharded: 1 FULL_SHARD everything, 2 "
          "SHARD_GRAD_OP not the parameters between forward and backward, 3 NO_SHARD nothing, 4 and 5 as 1 and 2 "
          "inside each machine.", STRATEGY_CHOICES, question="Which sharding strategy?"),
    _fsdp("fsdp_reshard_after_forward", Kind.BOOL, True, ONLY2, "true frees gathered parameters after forward and "
          "gathers them again in backward (FULL_SHARD); false keeps them: a third less traffic, a whole model more "
          "memory (SHARD_GRAD_OP)."),
    _fsdp("fsdp_auto_wrap_policy", Kind.CHOICE, "NO_WRAP", FSDP, "How units are made. Absent means NO_WRAP: one unit, "
          "gathered whole.",
          {"TRANSFORMER_BASED_WRAP": "one unit per transformer layer",
           "SIZE_BASED_WRAP": "a unit per module above a size",
           "NO_WRAP": "one unit for the whole model; saves little memory"},
          question="Which auto-wrap policy?"),
    _fsdp("fsdp_transformer_layer_cls_to_wrap", Kind.NAMES, None, FSDP | XLA, "Layer classes that become units under "
          "TRANSFORMER_BASED_WRAP, joined by commas without spaces. Absent: the model's _no_split_modules.",
          question="Which transformer layer class? (several: comma-separated)"),
    _fsdp("fsdp_min_num_params", Kind.INT, 100_000_000, ONLY1, "Parameters from which on a module becomes a unit under "
          "SIZE_BASED_WRAP.", question="From how many parameters on does a module become a unit?"),
    _fsdp("fsdp_offload_params", Kind.BOOL, False, FSDP, "Keeps parameters, gradients and optimizer state in host "
          "memory: 16 bytes per parameter less on the GPUs together; the optimizer steps on the CPU.",
          question="Keep weights, gradients and optimizer state in host memory (CPU offload)?"),
    _fsdp("fsdp_state_dict_type", Kind.CHOICE, None, FSDP, "How checkpoints are written. Absent: FULL under FSDP1, "
          "SHARDED under FSDP2.",
          {"SHARDED_STATE_DICT": "in parallel, a part per rank; train/sft.py still exports one model",
           "FULL_STATE_DICT": "gathered on rank 0 at every checkpoint",
           "LOCAL_STATE_DICT": "as FSDP1 holds it; loads on the same number of ranks only"},
          question="How are checkpoints written?"),
    _fsdp("fsdp_backward_prefetch", Kind.CHOICE, None, ONLY1, "When backward gathers the next unit: BACKWARD_PRE "
          "overlaps best and holds two units, BACKWARD_POST one.",
          _any_of("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")),
    _fsdp("fsdp_forward_prefetch", Kind.BOOL, False, ONLY1, "Gathers the next unit during forward; helps only where "
          "the CPU is the bottleneck."),
    _fsdp("fsdp_use_orig_params", Kind.BOOL, True, ONLY1, "Keeps original parameters visible: needed for frozen parts "
          "and for weight decay groups."),
    _fsdp("fsdp_sync_module_states", Kind.BOOL, True, ONLY1, "Broadcasts rank 0's weights when wrapping."),
    _fsdp("fsdp_cpu_ram_efficient_loading", Kind.BOOL, True, FSDP, "Ranks other than 0 start from empty weights "
          "and receive rank 0's.", question="Fill the ranks from rank 0's weights (RAM-efficient loading)?"),
    _fsdp("fsdp_activation_checkpointing", Kind.BOOL, False, FSDP, "Recomputes each unit's activations in backward: "
          "about a third more compute, activations shrink to one input per layer.",
          question="Recompute activations in backward to save memory (activation checkpointing)?"),
    _fsdp("fsdp_activation_checkpointing_offload", Kind.BOOL, False, ONLY2, "Moves the kept inputs to host memory.",
          question="Move the inputs that checkpointing keeps to host memory?"),
    _fsdp("fsdp_ignored_modules", Kind.TEXT, None, FSDP, "Regular expression of module names that stay unsharded."),
    _xla("xla", Kind.BOOL, "Shards with torch_xla's FSDP."),
    _xla("xla_fsdp_v2", Kind.BOOL, "Uses its SPMD version."),
    _xla("xla_fsdp_grad_ckpt", Kind.BOOL, "Recomputes each unit's activations in backward."),
)  # fmt: skip

MESH_FIELDS: tuple[Field, ...] = (
    _mesh("dp_replicate_size", Kind.INT, 1, "Replicas of the sharded model.", engines=MESHES),
    _mesh("dp_shard_size", Kind.INT, 1, "Ranks that share one replica."),
    _mesh("tp_size", Kind.INT, 1, "Tensor parallel ranks.", engines=MESHES),
    _mesh("cp_size", Kind.INT, 1, "Context parallel ranks."),
    _mesh("cp_backend", Kind.CHOICE, "torch", "Backend of context parallelism.", "torch"),
    _mesh("cp_comm_strategy", Kind.CHOICE, "allgather", "How context parallel ranks exchange keys and values.",
          "allgather", "alltoall"),
    _mesh("sp_size", Kind.INT, 1, "Sequence parallel ranks (DeepSpeed).", engines=DS),
    _mesh("sp_backend", Kind.CHOICE, "deepspeed", "Backend of sequence parallelism.", "deepspeed", engines=DS),
    _mesh("sp_seq_length", Kind.INT, None, "Sequence length, where it is the same for all batches.", engines=DS),
    _mesh("sp_seq_length_is_variable", Kind.BOOL, True, "Whether batches differ in length.", engines=DS),
    _mesh("sp_attn_implementation", Kind.TEXT, None, "Attention for sequence parallelism.", engines=DS),
)  # fmt: skip

AXES = tuple(
    field.key.removeprefix("parallelism_config_").removesuffix("_size")
    for field in MESH_FIELDS
    if field.key.endswith("_size")
)
"""The axes of the device mesh: replicas, shards, and those whose ranks share rows."""
DATA_AXES, OTHER_AXES = AXES[:2], AXES[2:]


def size_key(axis: str) -> str:
    """The key of an axis in `parallelism_config`."""
    return f"parallelism_config_{axis}_size"


def hybrid_mesh(machines: int, processes: int) -> dict[str, int]:
    """Hybrid sharding as sizes of `parallelism_config`: one replica per machine, shards inside each."""
    return dict(zip(map(size_key, DATA_AXES), (machines, processes // machines), strict=True))


DEEPSPEED_FIELDS: tuple[Field, ...] = (
    _deepspeed("deepspeed_config_file", Kind.TEXT, "DeepSpeed's own JSON; most other keys must then be absent."),
    _deepspeed("zero_stage", Kind.CHOICE, "What DeepSpeed shards; each stage saves memory and adds traffic.",
               {"3": f"parameters, gradients and optimizer state sharded ({ZERO_TWINS[3]})",
                "2": f"gradients and optimizer state sharded ({ZERO_TWINS[2]})",
                "1": "optimizer state sharded", "0": "nothing sharded: plain data parallel"},
               "Which ZeRO stage?"),
    _deepspeed("offload_optimizer_device", Kind.CHOICE, "Where the optimizer state lives.", DEVICES),
    _deepspeed("offload_param_device", Kind.CHOICE, "Where parameters live (stage 3).", DEVICES),
    *(Field(f"offload_{part}_nvme_path", Kind.TEXT, None, frozenset(), "Dropped by the launcher: give it in a "
            "deepspeed_config_file.", section="deepspeed_config") for part in ("optimizer", "param")),
    Field("seq_parallel_communication_data_type", Kind.TEXT, None, frozenset(), "A key of DeepSpeed's own file, which "
          "the launcher drops.", section="deepspeed_config"),
    _deepspeed("gradient_accumulation_steps", Kind.TEXT, "Micro-batches per step, or auto."),
    _deepspeed("gradient_clipping", Kind.TEXT, "Largest gradient norm, or auto."),
    _deepspeed("zero3_init_flag", Kind.BOOL, "Builds the model sharded (stage 3)."),
    _deepspeed("zero3_save_16bit_model", Kind.BOOL, "Gathers 16-bit weights on save (stage 3); without it save_model "
               "writes no model."),
    _deepspeed("deepspeed_hostfile", Kind.TEXT, "Hosts for several machines."),
    _deepspeed("deepspeed_exclusion_filter", Kind.TEXT, "Hosts and GPUs to leave out."),
    _deepspeed("deepspeed_inclusion_filter", Kind.TEXT, "Hosts and GPUs to use."),
    _deepspeed("deepspeed_multinode_launcher", Kind.CHOICE, "How processes start on other machines.",
               _any_of("pdsh", "standard", "openmpi", "mvapich", "mpich", "slurm", "nossh")),
    _deepspeed("deepspeed_moe_layer_cls_names", Kind.NAMES, "Mixture-of-experts layer classes."),
)  # fmt: skip

DYNAMO_FIELDS: tuple[Field, ...] = (
    _extra("dynamo_backend", Kind.CHOICE, "no", "Backend of torch.compile; no doesn't compile.", "no", "eager",
           "aot_eager", "inductor", "aot_ts_nvfuser", "nvprims_nvfuser", "cudagraphs", "ofi", "fx2trt", "onnxrt",
           "tensorrt", "aot_torchxla_trace_once", "torchxla_trace_once", "tvm", "hpu_backend", "neuron"),
    _extra("dynamo_mode", Kind.CHOICE, "default", "How hard torch.compile tries.", "default", "reduce-overhead",
           "max-autotune", "max-autotune-no-cudagraphs", "lite"),
    _extra("dynamo_use_fullgraph", Kind.BOOL, False, "Stops where the model can't be one graph."),
    _extra("dynamo_use_dynamic", Kind.BOOL, False, "Compiles for shapes that change."),
    _extra("dynamo_use_regional_compilation", Kind.BOOL, False, "Compiles one layer and uses it for all."),
)  # fmt: skip

FP8_FIELDS: tuple[Field, ...] = (
    _extra("fp8_backend", Kind.CHOICE, None, "Library: torchao, TransformerEngine, MS-AMP.", "AO", "TE", "MSAMP"),
    _extra("fp8_use_autocast_during_eval", Kind.BOOL, False, "TE: FP8 in evaluation too."),
    _extra("fp8_margin", Kind.INT, 0, "TE: margin of the scaling factor."),
    _extra("fp8_interval", Kind.INT, 1, "TE: steps between scaling factors."),
    _extra("fp8_format", Kind.CHOICE, "HYBRID", "TE: number format.", "HYBRID", "E4M3", "E5M2"),
    _extra("fp8_amax_history_len", Kind.INT, 1024, "TE: length of the history that scaling looks at."),
    _extra("fp8_amax_compute_algo", Kind.CHOICE, "most_recent", "TE: how scaling looks at it.", "max", "most_recent"),
    _extra("fp8_override_linear_precision", Kind.TEXT, None, "TE: three booleans, for fprop, dgrad and wgrad."),
    _extra("fp8_use_mxfp8_block_scaling", Kind.BOOL, False, "TE: MXFP8 with block scaling."),
    _extra("fp8_opt_level", Kind.CHOICE, "O2", "MS-AMP: level of 8-bit communication.", "O1", "O2"),
    _extra("fp8_enable_fsdp_float8_all_gather", Kind.BOOL, True, "AO: gathers parameters in FP8."),
    _extra("fp8_pad_inner_dim", Kind.BOOL, True, "AO: pads matrices to what FP8 needs."),
)  # fmt: skip

FIELDS: tuple[Field, ...] = TOP + FSDP_FIELDS + MESH_FIELDS + DEEPSPEED_FIELDS + DYNAMO_FIELDS + FP8_FIELDS
BY_NAME: Mapping[tuple[str, str], Field] = {(field.section, field.key): field for field in FIELDS}

RETIRED: Mapping[str, str] = {
    "fsdp_backward_prefetch_policy": "fsdp_backward_prefetch",
    "fsdp_transformer_cls_to_wrap": "fsdp_transformer_layer_cls_to_wrap",
    "fsdp_cpu_offload": "fsdp_offload_params",
}
"""Keys of older releases, or of other tools, that Accelerate accepts and drops, with the key that is read today."""

MISNAMED: Mapping[str, str] = {
    "fp8_amax_history_length": "fp8_amax_history_len",
    "fp8_amax_compute_algorithm": "fp8_amax_compute_algo",
    "fp8_optimization_level": "fp8_opt_level",
}
"""Keys that `accelerate config` itself writes into `fp8_config` and its launcher doesn't read."""

PREFIXES = {"fsdp_config": "fsdp", "fp8_config": "fp8", "dynamo_config": "dynamo_"}
"""The start of a section's keys that Accelerate's launcher checks before it adds the prefix."""


def full_name(section: str, key: str) -> str:
    """The name under which Accelerate looks for a key: inside three sections the prefix may be left out."""
    start = PREFIXES.get(section, "")
    return key if key.startswith(start) else f"{start.removesuffix('_')}_{key}"


def short_name(section: str, key: str) -> str:
    """A key without the prefix that may be left out."""
    start = PREFIXES.get(section)
    return key.removeprefix(f"{start.removesuffix('_')}_") if start else key


@cache
def known_fields(section: str) -> Mapping[str, Field]:
    return {key: field for (its_section, key), field in BY_NAME.items() if its_section == section}
