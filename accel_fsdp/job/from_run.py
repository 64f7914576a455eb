"""Describes a live run as a job, from the launcher's variables, an `Accelerator` and its model."""

import gc
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from accel_fsdp.config import AXES, DDP_TYPES, FSDP_VERSIONS, OTHER_AXES, Engine, deepspeed_name
from accel_fsdp.job import from_arguments, from_yaml
from accel_fsdp.job.job import Job
from accel_fsdp.job.layout import Layout
from accel_fsdp.launch_environment import LaunchEnvironment
from accel_fsdp.models import optimizers, state_bytes

if TYPE_CHECKING:
    from torch import nn

OF_ONE_ROW = {*OTHER_AXES, "pp", "tensor", "context", "sequence", "pipeline", "model"}
"""Names that scripts give the dimensions of a mesh whose ranks train on the same rows."""


def engine_here() -> Engine:
    """The engine that the launcher's variables select."""
    launch = LaunchEnvironment.now()
    if launch.uses_deepspeed:
        return Engine.DEEPSPEED
    if launch.uses_fsdp:
        return Engine.FSDP2 if launch.uses_fsdp2 else Engine.FSDP1
    return Engine.DDP if launch.world_size > 1 else Engine.NONE


def engine_of(model: Any) -> str:
    """The engine that wraps a model, in words, with FSDP1's strategy or DeepSpeed's stage."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    if is_deepspeed(model):
        return deepspeed_name(model.zero_optimization_stage())
    trained = {id(weight) for weight in model.parameters() if weight.grad is not None}
    for module in model.modules():  # the model itself, or what it holds, such as a task that computes the loss
        if isinstance(module, DistributedDataParallel) and trained <= {id(weight) for weight in module.parameters()}:
            return Engine.DDP.label
    fsdp1 = next((module for module in model.modules() if isinstance(module, FullyShardedDataParallel)), None)
    if fsdp1 is not None:
        return f"{Engine.FSDP1.label} {fsdp1.sharding_strategy.name}"
    sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    return Engine.FSDP2.label if sharded else Engine.NONE.label


def is_deepspeed(model: Any) -> bool:
    """Whether DeepSpeed wraps a model; doesn't import DeepSpeed."""
    return type(model).__name__ == "DeepSpeedEngine"


def layout_of(accelerator: Any) -> Layout | None:
    """Reads the layout from Accelerate's plugins; None for engines that can't be predicted."""
    ranks = int(accelerator.num_processes)
    launch = LaunchEnvironment.now()
    together = launch.local_world_size if launch.is_rank else ranks
    if launch.by_transformers:
        return None
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None:
        return _fsdp_layout(plugin, getattr(accelerator, "parallelism_config", None), ranks, together)
    deepspeed = getattr(accelerator.state, "deepspeed_plugin", None)
    if deepspeed is not None:
        section = deepspeed.deepspeed_config.get("zero_optimization", {})
        offloads = (section.get("offload_optimizer") or {}).get("device") == "cpu"
        return Layout.zero(int(deepspeed.zero_stage), ranks, together, offloads)
    kind = accelerator.distributed_type.value
    if kind == "NO":
        return Layout.alone()
    return Layout.ddp(ranks, together) if kind in DDP_TYPES else None


def _fsdp_layout(plugin: Any, mesh: Any, ranks: int, together: int) -> Layout:
    offload = _offloads(plugin)
    if FSDP_VERSIONS[plugin.fsdp_version] is Engine.FSDP1:
        strategy_name = plugin.sharding_strategy.name.removeprefix("_")  # torch's own _HYBRID_SHARD_ZERO2
        return Layout.fsdp1(strategy_name, ranks, together, offload)
    layout = Layout.fsdp2(bool(plugin.reshard_after_forward), ranks, together, offload)
    return layout.on_mesh({axis: int(getattr(mesh, f"{axis}_size", 1)) for axis in AXES})


def _offloads(plugin: Any) -> bool:
    from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy

    cpu_offload = plugin.cpu_offload
    return isinstance(cpu_offload, CPUOffloadPolicy) or (
        isinstance(cpu_offload, CPUOffload) and bool(cpu_offload.offload_params)
    )


def ranks_may_share_rows() -> bool:
    """Whether this process has a device mesh whose ranks may train on the same rows, as in tensor parallelism."""
    from torch.distributed.device_mesh import DeviceMesh

    meshes = [candidate for candidate in gc.get_objects() if issubclass(type(candidate), DeviceMesh)]
    dimensions = [pair for mesh in meshes for pair in zip(mesh.mesh_dim_names or (), mesh.shape, strict=False)]
    return any(size > 1 and name in OF_ONE_ROW for name, size in dimensions)


def job_of(model: "nn.Module", args: Any, accelerator: Any, packed: bool = False) -> Job | None:
    """Describes a run by its `Accelerator`, its `model` before wrapping, and Trainer's `args`.

    The recipe has one row of one token until a batch is known. `packed`: rows hold several documents. Returns None for
    TPUs, and for optimizers and dtypes that the planner doesn't support.
    """
    layout = layout_of(accelerator)
    dtype = str(getattr(model, "dtype", "")).removeprefix("torch.")
    optimizer_name = str(getattr(args.optim, "value", args.optim))
    optimizer = optimizers.BY_TRAINERS_NAME.get(optimizer_name)
    if layout is None or layout.shares_rows or optimizer is None or dtype not in state_bytes.DTYPE_BYTES:
        return None
    recipe = replace(
        from_arguments.recipe_of({**_arguments(model, args), "dtype": dtype, "packing": packed}),
        precision=from_yaml.PRECISIONS.get(str(accelerator.mixed_precision), "no"),
        rows=1,
        length=1,
    )
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None and plugin.activation_checkpointing:
        offloads = bool(getattr(plugin, "activation_checkpointing_offload", False))
        recipe = replace(recipe, checkpointing="full", offloads_inputs=offloads)
    return Job(layout, recipe, model=str(model.config._name_or_path), optimizer=optimizer_name)  # type: ignore[union-attr]


FROM_TRAINER = (
    *("gradient_accumulation_steps", "optim", "gradient_checkpointing", "gradient_checkpointing_kwargs"),
    *("use_liger_kernel", "eval_strategy", "per_device_eval_batch_size"),
)
"""The arguments of Trainer that decide a recipe, besides the sizes of a batch."""


def _arguments(model: "nn.Module", args: Any) -> dict[str, Any]:
    """The arguments of `train/sft.py` that would make this model and this run."""
    given = {name: getattr(args, name) for name in FROM_TRAINER}
    given = {name: getattr(value, "value", value) for name, value in given.items()}  # enums as their words
    given["attn_implementation"] = str(getattr(model.config, "_attn_implementation", ""))
    adapter = next(iter(getattr(model, "peft_config", {}).values()), None)
    if adapter is None:
        return given
    given |= {"use_peft": True, "load_in_4bit": bool(getattr(model, "is_loaded_in_4bit", False))}
    if not hasattr(adapter, "r"):
        return given
    names = list(adapter.target_modules)
    return given | {"lora_r": adapter.r, "lora_dropout": adapter.lora_dropout, "lora_target_modules": names}
