"""What the plan says of the run that is going on: its layout and recipe, its peak memory, and what would shrink it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from accel_fsdp import console
from accel_fsdp.config import DDP_TYPES, FSDP_VERSIONS, Engine
from accel_fsdp.errors import UsageError
from accel_fsdp.hardware import Gpu, gpus
from accel_fsdp.job import Layout, Recipe, Sharding, from_arguments, from_yaml
from accel_fsdp.launch_environment import LaunchEnvironment
from accel_fsdp.models import state_bytes
from accel_fsdp.prediction import name_of, predicted, savings, speed
from accel_fsdp.prediction.memory import ModelShape, Tapes
from accel_fsdp.prediction.tracing import by_name
from accel_fsdp.units import GIB, gib_or_mib

if TYPE_CHECKING:
    from torch import nn

SHOWN_SAVINGS = 5


@dataclass(frozen=True)
class RunJob:
    """A run in the planner's words. `recipe` has one row of one token until a batch was seen."""

    model: str
    recipe: Recipe
    layout: Layout

    @property
    def strategy(self) -> str:
        """As `accel-fsdp plan` names it."""
        return name_of(self.layout)


@dataclass(frozen=True)
class Forecast:
    """A job with its model's shape and tapes, which take seconds to read the first time."""

    job: RunJob
    shape: ModelShape
    tapes: Mapping[str, Tapes]

    def peak_bytes(self, rows: int, length: int, gpu: Gpu | None) -> int:
        """What one rank allocates at most in a step of this batch."""
        recipe = replace(self.job.recipe, rows=rows, length=length)
        return predicted(self.shape, self.tapes, recipe, self.job.layout, gpu).peak.total

    def mfu(self, tokens_per_s: float, length: float, gpu: Gpu) -> float:
        """The share of all ranks' peak that training documents of a mean `length` at that rate takes."""
        recipe = replace(self.job.recipe, rows=1, length=max(round(length), 1))
        flops_per_token = speed.useful_flops(self.shape, recipe) / recipe.length
        return tokens_per_s * flops_per_token / (self.job.layout.ranks * speed.peak_flops(recipe, gpu))

    def advice(self, rows: int, length: int) -> list[str]:
        """What would free memory, the most first, as lines of text."""
        recipe = replace(self.job.recipe, rows=rows, length=length)
        found = savings(self.shape, self.tapes, recipe, self.job.layout)[:SHOWN_SAVINGS]
        return [f"{gib_or_mib(one.freed_bytes, gib_from=GIB / 10)} less: {one.change}" for one in found]


def read(job: RunJob) -> Forecast:
    """Reads the model's shape and tapes: bundled, cached, or recorded now, away from this process's random numbers.

    Raises:
        UserError: the model can't be read.
        RuntimeError: it can't be recorded.
    """
    import torch

    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices), console.waiting("Reading the model for the plan"):
        return Forecast(job, *by_name.read_shape(job.model, job.recipe))


def gpu_here() -> tuple[Gpu | None, str]:
    """The GPU of this rank where the table has it; else None and why its peak is unknown."""
    import torch

    if not torch.cuda.is_available():
        return None, "the peak of what isn't a GPU is not known"
    name = torch.cuda.get_device_name()
    try:
        return gpus.find(name, torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory / GIB), ""
    except UsageError:
        return None, f"{name} is not in the table of GPUs"


def job_of(model: "nn.Module", args: Any, accelerator: Any) -> RunJob | None:
    """What an `Accelerator` made of the YAML, with what `model`, not yet wrapped, and Trainer's `args` say of the rest.

    None for what the planner doesn't know: TPUs, other optimizers, other dtypes.
    """
    layout = _layout(accelerator)
    dtype = str(getattr(model, "dtype", "")).removeprefix("torch.")
    optimizer = from_arguments.OPTIMIZERS.get(getattr(args.optim, "value", args.optim))
    if layout is None or optimizer is None or dtype not in state_bytes.DTYPE_BYTES:
        return None
    adapter = next(iter(getattr(model, "peft_config", {}).values()), None)
    quantized = bool(getattr(model, "is_loaded_in_4bit", False))
    recipe = Recipe(
        method="full" if adapter is None else "qlora" if quantized else "lora",
        precision=from_yaml.PRECISIONS.get(str(accelerator.mixed_precision), "no"),
        dtype=dtype,  # type: ignore[arg-type]
        rows=1,
        length=1,
        accumulation=args.gradient_accumulation_steps,
        optimizer=optimizer,
        checkpointing=_checkpointing(args, accelerator),  # type: ignore[arg-type]
        kernels="liger" if args.use_liger_kernel else "none",
        attention=from_arguments.attention_of(str(getattr(model.config, "_attn_implementation", ""))),
        **_adapter(adapter),
    )
    return RunJob(str(model.config._name_or_path), recipe, layout)  # type: ignore[union-attr]


def _adapter(config: Any) -> dict[str, Any]:
    if config is None or not hasattr(config, "r"):
        return {}
    return {
        "lora_rank": config.r,
        "lora_dropout": config.lora_dropout > 0,
        "lora_targets": from_arguments.targets_of(config.target_modules),
    }


def _checkpointing(args: Any, accelerator: Any) -> str:
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None and plugin.activation_checkpointing:
        return "full"
    if not args.gradient_checkpointing:
        return "none"
    kwargs = args.gradient_checkpointing_kwargs or {}
    return "reentrant" if isinstance(kwargs, dict) and kwargs.get("use_reentrant") else "full"


def _layout(accelerator: Any) -> Layout | None:
    """Read from the plugins that Accelerate made of the YAML; None for engines that can't be predicted."""
    ranks = int(accelerator.num_processes)
    launch = LaunchEnvironment.now()
    together = launch.local_world_size if launch.is_rank else ranks
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None:
        sharding = Sharding(FSDP_VERSIONS[plugin.fsdp_version], ranks, together, _offloads(plugin))
        return _as_fsdp_shards(sharding, plugin, accelerator).layout()
    deepspeed = getattr(accelerator.state, "deepspeed_plugin", None)
    if deepspeed is not None:
        section = deepspeed.deepspeed_config.get("zero_optimization", {})
        offload = (section.get("offload_optimizer") or {}).get("device") == "cpu"
        return Sharding(Engine.DEEPSPEED, ranks, together, offload, stage=int(deepspeed.zero_stage)).layout()
    engine = {"NO": Engine.NONE, **dict.fromkeys(DDP_TYPES, Engine.DDP)}.get(accelerator.distributed_type.value)
    return Sharding(engine, ranks, together).layout() if engine else None


def _as_fsdp_shards(sharding: Sharding, plugin: Any, accelerator: Any) -> Sharding:
    if plugin.fsdp_version == 1:
        named = plugin.sharding_strategy.name.removeprefix("_")  # torch's own _HYBRID_SHARD_ZERO2
        return replace(sharding, strategy=named)
    sharding = replace(sharding, reshards=bool(plugin.reshard_after_forward))
    mesh = getattr(accelerator, "parallelism_config", None)
    if mesh is None:
        return sharding
    return replace(sharding, copies=int(mesh.dp_replicate_size), shards=int(mesh.dp_shard_size))


def _offloads(plugin: Any) -> bool:
    from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy

    asked = plugin.cpu_offload
    return isinstance(asked, CPUOffloadPolicy) or (isinstance(asked, CPUOffload) and bool(asked.offload_params))
