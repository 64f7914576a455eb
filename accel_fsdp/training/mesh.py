"""Tensor and expert parallelism: transformers, not Accelerate, shards the model over the job's mesh while loading.

Accelerate's own `tp_size` splits no layer with transformers 5.17 or later, and it has no axis for experts.
"""

import os
from dataclasses import astuple, dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

from packaging.version import Version
from torch.distributed.tensor import DTensor

from accel_fsdp import console, models
from accel_fsdp.config import EXPERT_FLAG, NATIVE_SIZES, Engine, expert_refusal
from accel_fsdp.errors import UsageError, UserError
from accel_fsdp.job import Layout
from accel_fsdp.launch_environment import MESH, LaunchEnvironment
from accel_fsdp.training import tensor_parallel_patches
from accel_fsdp.units import counted, millions

if TYPE_CHECKING:
    from torch import nn
    from transformers.distributed import DistributedConfig

HIDDEN = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG", "FSDP_CPU_RAM_EFFICIENT_LOADING")
"""Variables that Accelerate must not find, nor the sizes of its mesh: it would shard the model once more."""
SINCE = "5.23"
"""The first version of transformers whose meshes were compared with one process."""


@dataclass(frozen=True)
class Mesh:
    """The sizes of a mesh: `replicas` of `shards`, each of which is divided over `tensor` ranks.

    `experts` ranks hold different experts: `shards` x `tensor` ranks are divided into groups of that size, over which
    each expert is sharded.
    """

    replicas: int
    shards: int
    tensor: int
    experts: int

    @classmethod
    def of_launch(cls) -> "Mesh":
        """The mesh of this job, from the launcher's variables; the remaining factor of the ranks is shards."""
        launch = LaunchEnvironment.now()
        sizes = {"dp_replicate": 1, "tp": 1, "ep": 1, **launch.mesh}
        shards, rest = divmod(launch.world_size, sizes["dp_replicate"] * sizes["tp"])
        if rest or sizes.get("dp_shard", shards) != shards:
            laid_out = " x ".join(f"{name} {size}" for name, size in launch.mesh.items())
            raise UsageError(
                f"the mesh of {laid_out} doesn't fit {counted(launch.world_size, 'rank')}",
                why="each rank has one place in it",
                fix=f"parallelism_config sizes whose product is {launch.world_size}",
            )
        return cls(sizes["dp_replicate"], shards, sizes["tp"], sizes["ep"])

    @classmethod
    def of_layout(cls, layout: Layout) -> "Mesh":
        return cls(layout.replicas, layout.shard_ranks, layout.tensor, layout.experts)

    def __str__(self) -> str:
        named = {"replicas": self.replicas, "fsdp": self.shards, "tp": self.tensor, "ep": self.experts}
        return " x ".join(f"{name} {size}" for name, size in named.items() if size > 1)

    def config(self, mixed: bool, offload: bool) -> "DistributedConfig":
        """The mesh as transformers' `DistributedConfig`."""
        from transformers.distributed import DistributedConfig

        return DistributedConfig(
            dp_replicate_size=self.replicas,
            fsdp_size=self.shards,
            tp_size=self.tensor,
            ep_size=self.experts,
            fsdp_mixed_precision=mixed,
            fsdp_cpu_offload=offload,
        )


def choose(experts: int) -> None:
    """Has transformers shard the model if the YAML has a tensor axis, or experts are divided. Call before Accelerate.
    Raises: UsageError: the engine or another axis can't be combined with it.
    """
    launch = LaunchEnvironment.now()
    sizes = launch.mesh
    if experts == 1 and "tp" not in sizes:
        return
    axis = f"tp_size: {sizes['tp']}" if "tp" in sizes else f"{EXPERT_FLAG} {experts}"
    if Version(metadata.version("transformers")) < Version(SINCE):
        raise UserError(
            f"{axis} with transformers {metadata.version('transformers')}",
            why="its tensor and expert parallelism lacks axes, or trains with wrong gradients",
            fix=f"pip install 'transformers>={SINCE}'",
        )
    if not launch.uses_fsdp2:
        raise UsageError(
            f"{axis} without {Engine.FSDP2.label}",
            why="transformers shards the model with it, and only that way",
            fix="distributed_type: FSDP and fsdp_version: 2 in the YAML",
        )
    if other := next((name for name in ("cp", "sp") if name in sizes), ""):
        raise UsageError(
            f"{axis} with {other}_size: {sizes[other]}",
            why="transformers has no axis for parts of a row",
            fix=f"{other}_size: 1",
        )
    os.environ[MESH] = " ".join(f"{name}={size}" for name, size in {**sizes, "ep": experts}.items())
    for name in [name for name in os.environ if name in HIDDEN or name.startswith("PARALLELISM_CONFIG_")]:
        del os.environ[name]
    mesh = Mesh.of_launch()
    if refused := expert_refusal(dict(zip(NATIVE_SIZES, astuple(mesh), strict=True))):
        raise UsageError(
            f"{EXPERT_FLAG} {experts} on a mesh of {mesh}",
            why=f"transformers refuses it: {refused}",
            fix=f"{EXPERT_FLAG} {mesh.shards * mesh.tensor}, or another multiple of {mesh.tensor} that divides it",
        )
    tensor_parallel_patches.enable()


def check(config: Any, adapted: bool, quantized: bool) -> None:
    """Checks a model's config and the flags about its weights, before these are read.

    Raises:
        UserError: the model has no plan for an axis, a size doesn't divide, or a library fails.
    """
    if LaunchEnvironment.now().by_transformers:
        check_on(Mesh.of_launch(), config, adapted, quantized)


def check_on(mesh: Mesh, config: Any, adapted: bool, quantized: bool) -> None:
    """As `check`, for any mesh."""
    text = config.get_text_config()
    if quantized:
        raise UsageError(
            f"--load_in_4bit on a mesh of {mesh}",
            why="packed weights can't be split by tensor or expert parallelism",
            fix="leave out --load_in_4bit; or parallelism_config_tp_size: 1 and no " + EXPERT_FLAG,
        )
    if adapted and mesh.tensor > 1:
        raise UsageError(
            f"--use_peft with tp_size: {mesh.tensor}",
            why="PEFT 0.21 stops in the first step of an adapter on split layers",
            fix="parallelism_config_tp_size: 1; experts may be divided: " + EXPERT_FLAG,
        )
    facts = models.parallel_plans.divisible_by_config(config)
    for name, size, plan in (("tp", mesh.tensor, "tensor_plan"), ("ep", mesh.experts, "expert_plan")):
        if size > 1 and not facts[plan]:
            raise UserError(
                f"{name} {size}: transformers has no plan to divide a {config.model_type}",
                why="it doesn't know which of its layers to split, and how",
                fix="parallelism_config_tp_size: 1" if name == "tp" else f"leave out {EXPERT_FLAG}",
            )
    experts = next((count for name in models.config_json.EXPERTS if (count := getattr(text, name, None))), 0)
    counts = (("attention heads", facts["heads"], "tp", mesh.tensor), ("experts", experts, "ep", mesh.experts))
    for name, count, axis, size in (*counts, ("key/value heads", facts["kv_heads"], "tp", mesh.tensor)):
        if count % size:
            raise UserError(
                f"{axis} {size} doesn't divide the model's {count} {name}",
                why="each rank holds a whole number of them",
                fix=f"a size of {axis} that divides {count}",
            )
    _check_tie(facts["tied_rows"], mesh)


def _check_tie(rows: int, mesh: Mesh) -> None:
    """Refuses padded shards of a tied weight: transformers 5.23 gives it to FSDP twice, and torch copies one."""
    ranks = mesh.shards * mesh.tensor
    if mesh.shards > 1 and rows % ranks:
        raise UserError(
            f"a vocabulary of {rows:,} in an embedding that is also the head, over fsdp x tp {ranks}",
            why="the head would keep its first weights while the embedding is trained, without an error",
            fix=f"fsdp x tp of a size that divides {rows:,}; or parallelism_config_tp_size: 1 and no {EXPERT_FLAG}",
        )


def check_adapter(model: "nn.Module") -> None:
    """Refuses an adapter on experts that are divided: PEFT 0.21 adds its whole matrices to a rank's part."""
    launch = LaunchEnvironment.now()
    if launch.by_transformers and any(type(part).__name__ == "ParamWrapper" for part in model.modules()):
        raise UsageError(
            f"an adapter on the experts with {EXPERT_FLAG} {launch.mesh.get('ep', 1)}",
            why="PEFT 0.21 stops in the first step: each rank has some experts only",
            fix="--lora_target_modules q_proj k_proj v_proj o_proj",
        )


def loading() -> dict[str, "DistributedConfig"]:
    """The argument with which `from_pretrained` shards a model; empty if Accelerate does, or if it isn't sharded."""
    launch = LaunchEnvironment.now()
    if not launch.by_transformers:
        return {}
    return {"distributed_config": Mesh.of_launch().config(launch.mixed_precision == "bf16", launch.offloads)}


def announce(model: "nn.Module", args: Any) -> None:
    """Logs how the model is sharded, and each rank's part."""
    if args.process_index == 0:
        parameters = list(model.parameters())
        held = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in parameters)
        share = f"{millions(held)} of {millions(sum(p.numel() for p in parameters))} parameters"
        text = f"sharding: transformers, {Mesh.of_launch()}: each rank holds {share}; gradients are summed in float32"
        console.say(text, style="cyan")
