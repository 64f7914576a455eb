"""Tensor and expert parallelism: transformers, not Accelerate, shards the model over the job's mesh while loading.

Accelerate's own `tp_size` splits no layer with transformers 5.17 or later, and it has no axis for experts.
"""

import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from accel_fsdp import console, library_internals, models
from accel_fsdp.checkpoints import clean_name
from accel_fsdp.config import AXES, EXPERT_FLAG, Engine, Method
from accel_fsdp.errors import UsageError, UserError
from accel_fsdp.job import NATIVE_SIZES, ROW_AXES, Layout, mesh_fits
from accel_fsdp.launch_environment import EXPERT_AXIS, MESH, LaunchEnvironment
from accel_fsdp.library_internals import Internal
from accel_fsdp.training import patches
from accel_fsdp.units import counted, millions

if TYPE_CHECKING:
    from torch import nn
    from transformers.distributed import DistributedConfig

HIDDEN = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG", "FSDP_CPU_RAM_EFFICIENT_LOADING")
"""Variables that Accelerate must not find, nor the sizes of its mesh: it would shard the model once more."""

RELIES_ON = (Internal("transformers.distributed.mixin:DistributedMixin._device_mesh"),)
APART = 1e-3
"""How far sum and norm of equal gradients may be apart on two ranks, as a part of the norm: they differ by rounding."""
REDISTRIBUTING = "torch.distributed.tensor._redistribute"
"""The logger of torch that warns on every rank about the order of gathers, which transformers' plans determine."""


def layout_here() -> Layout:
    """The mesh of this job, from the launcher's variables.

    Raises:
        UsageError: the ranks don't fit into it.
    """
    launch = LaunchEnvironment.now()
    sizes = {axis: launch.mesh.get(axis, 1) for axis in AXES}
    if not mesh_fits(sizes, launch.world_size):
        laid_out = " x ".join(f"{name} {size}" for name, size in launch.mesh.items())
        raise UsageError(
            f"the mesh of {laid_out} doesn't fit {counted(launch.world_size, 'rank')}",
            why="each rank has one place in it",
            fix=f"parallelism_config sizes whose product is {launch.world_size}",
        )
    whole = Layout.fsdp2(True, launch.world_size, launch.local_world_size).on_mesh(sizes)
    return replace(whole, experts=launch.mesh.get(EXPERT_AXIS, 1))


def choose(experts: int) -> None:
    """Has transformers shard the model if the YAML has a tensor axis, or experts are divided. Call before Accelerate.

    Raises:
        UserError: transformers is too old.
        UsageError: the engine or another axis can't be combined with it.
    """
    launch = LaunchEnvironment.now()
    sizes = launch.mesh
    if experts == 1 and "tp" not in sizes:
        return
    axis = f"tp_size: {sizes['tp']}" if "tp" in sizes else f"{EXPERT_FLAG} {experts}"
    models.parallel_plans.check_version(axis)
    if not launch.uses_fsdp2:
        raise UsageError(
            f"{axis} without {Engine.FSDP2.label}",
            why="transformers shards the model with it, and only that way",
            fix="distributed_type: FSDP and fsdp_version: 2 in the YAML",
        )
    if row_axis := next((name for name in ROW_AXES if name in sizes), ""):
        raise UsageError(
            f"{axis} with {row_axis}_size: {sizes[row_axis]}",
            why="transformers has no axis for parts of a row",
            fix=f"{row_axis}_size: 1",
        )
    os.environ[MESH] = " ".join(f"{name}={size}" for name, size in {**sizes, "ep": experts}.items())
    for name in [name for name in os.environ if name in HIDDEN or name.startswith("PARALLELISM_CONFIG_")]:
        del os.environ[name]
    layout_here().check_experts()
    library_internals.check(*RELIES_ON, why="gradients are compared over its ranks")
    patches.fix_tensor_parallelism()
    logging.getLogger(REDISTRIBUTING).setLevel(logging.ERROR)


def check(config: Any, method: Method, targets: Iterable[str] = ()) -> None:
    """Checks a model's config and the flags about its weights, before these are read.

    `targets` are the modules that get an adapter.

    Raises:
        UserError: the model has no plan for an axis, a size doesn't divide, or a library fails.
    """
    if LaunchEnvironment.now().by_transformers:
        check_on(layout_here(), config, method, targets)


def check_on(layout: Layout, config: Any, method: Method, targets: Iterable[str] = ()) -> None:
    """Checks like `check`, for any mesh."""
    divisible = models.parallel_plans.divisible_by_config(config)
    for misfit in divisible.misfits(layout.sizes, method, torch=torch.__version__, targets=targets):
        raise UserError(misfit.what, why=misfit.why, fix=misfit.fix)


def loading() -> dict[str, "DistributedConfig"]:
    """The argument with which `from_pretrained` shards a model; empty if Accelerate does, or if it isn't sharded."""
    launch = LaunchEnvironment.now()
    if not launch.by_transformers:
        return {}
    from transformers.distributed import DistributedConfig

    sizes = dict(zip(NATIVE_SIZES, layout_here().sizes.values(), strict=True))
    mixed = launch.mixed_precision == "bf16"
    offloads = launch.offloads and torch.accelerator.is_available()  # on the CPU torch would stop
    return {"distributed_config": DistributedConfig(**sizes, fsdp_mixed_precision=mixed, fsdp_cpu_offload=offloads)}


class GradientCheck(TrainerCallback):  # type: ignore[misc]
    """Compares the first gradients of weights that `tp` leaves whole: its ranks must have the same.

    A weight that is applied to a rank's part of a layer, such as one of an activation, gets a part of its gradient
    unless transformers' plan for the model sums it. Nothing else shows that: Trainer averages such gradients over the
    ranks where FSDP doesn't shard them (5.23), so they are compared before.
    """

    def __init__(self) -> None:
        self.is_needed = "tp" in LaunchEnvironment.now().mesh
        self.numbers: dict[str, torch.Tensor] = {}
        self.remove: list[Callable[[], None]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if self.is_needed:
            for name, weight in _whole_weights(model):
                if not isinstance(weight, DTensor):  # torch calls no hook of one
                    self.remove.append(weight.register_hook(self._hook(name)).remove)  # type: ignore[no-untyped-call]

    def _hook(self, name: str) -> Callable[[torch.Tensor], None]:
        def note(gradient: torch.Tensor) -> None:
            if name not in self.numbers:  # else it is of a later micro-batch
                self.numbers[name] = _sum_and_norm(gradient)

        return note

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if not self.is_needed:
            return
        self.is_needed = False
        while self.remove:
            self.remove.pop()()
        for name, weight in _whole_weights(model):
            if isinstance(weight.grad, DTensor):
                self.numbers[name] = _sum_and_norm(weight.grad.to_local())
        if not self.numbers:
            return
        mine = torch.stack(list(self.numbers.values()))
        group = model._device_mesh["tp"].get_group()
        of_ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(of_ranks, mine, group=group)
        apart = (torch.stack(of_ranks) - mine).abs().amax((0, 2))
        for name, by, norm in zip(self.numbers, apart.tolist(), mine[:, 1].tolist(), strict=True):
            if by > APART * norm:
                raise UserError(
                    f"the ranks of tp have other gradients of {clean_name(name)}, which each of them holds whole",
                    why="transformers' plan for this model doesn't sum them: the weight would be trained wrong",
                    fix="tp_size: 1 in the YAML's parallelism_config, and a dp_shard_size so many times as large",
                )


def _whole_weights(model: Any) -> Iterable[tuple[str, torch.nn.Parameter]]:
    """The trained weights that transformers' plans neither divide nor sum the gradients of."""
    plan = {**(model.tp_plan or {}), **(model.ep_plan or {})}
    for name, weight in model.named_parameters():
        if weight.requires_grad and not models.parallel_plans.style_of(name, plan):
            yield name, weight


def _sum_and_norm(gradient: torch.Tensor) -> torch.Tensor:
    return torch.stack([gradient.sum(dtype=torch.float64), gradient.double().norm()])


def announce(model: "nn.Module", args: Any) -> None:
    """Logs how the model is sharded, and each rank's part."""
    if args.process_index == 0:
        parameters = list(model.parameters())
        held = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in parameters)
        share = f"{millions(held)} of {millions(sum(p.numel() for p in parameters))} parameters"
        text = f"sharding: transformers, {layout_here().mesh}: each rank holds {share}; gradients are summed in float32"
        console.say(text, style="cyan")
