"""Checks that a prepared model is sharded: units of the right size, on every rank."""

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerState, TrainingArguments

from accel_fsdp import console
from accel_fsdp.config import Engine
from accel_fsdp.errors import UserError
from accel_fsdp.launch_environment import LaunchEnvironment
from accel_fsdp.ranks import Holding, measure
from accel_fsdp.units import millions

if TYPE_CHECKING:
    from torch import nn


class ShardingCheck(TrainerCallback):  # type: ignore[misc]
    """Stops a run whose parameters are not sharded although the YAML asks for it, before the first step."""

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Measures the wrapped model and logs what each rank holds."""
        launch = LaunchEnvironment.now()
        no_shard = launch.uses_fsdp1 and launch.sharding_strategy in ("3", "NO_SHARD")
        holding = measured(kwargs["model"], allow_whole=launch.ignores_modules)
        if args.world_size > 1 and not no_shard and any(unit.ranks == 1 for unit in holding.units):
            raise unsharded("its shards are shared by one rank only")
        if state.is_world_process_zero:
            console.say(f"sharding: {shown(holding)}", style="cyan")


def measured(model: "nn.Module", allow_whole: bool = False) -> Holding:
    """The weights that this rank holds of a model after `Accelerator.prepare`.

    `allow_whole`: the YAML's `fsdp_ignored_modules` keeps some parameters whole on purpose; others are an error.
    """
    holding = measure(model)
    if not holding.units:
        raise unsharded(f"{type(model).__name__} was not wrapped at all")
    if holding.whole and not allow_whole:
        raise unsharded(f"{holding.whole:,} of {holding.weights:,} weights are in no unit")
    padded = holding.engine.startswith(Engine.FSDP1.label)  # FSDP1 pads each rank's part to the longest
    for unit in holding.units:
        if unit.held > unit.share or (padded and unit.held != unit.share):
            raise unsharded(f"a unit of {unit.weights:,} weights has {unit.held:,} on this rank of {unit.ranks}")
    return holding


def shown(holding: Holding) -> str:
    share = f"{millions(holding.held)} of {millions(holding.weights)} parameters"
    return f"{holding.engine}: {len(holding.units)} units, each rank holds {share}"


def unsharded(what: str) -> UserError:
    """The error for a model that is not sharded, or not as far as the YAML asks."""
    return UserError(
        f"the model is not sharded: {what}",
        why="every rank would train, and pay for, the whole model",
        fix="distributed_type: FSDP in the YAML, and no --multi_gpu or --fsdp flag beside it",
    )
