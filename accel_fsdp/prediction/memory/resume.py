"""Predicts the memory of a resume: the peak while a rank loads weights and optimizer. Pure.

What each engine holds was followed on real ranks, storage by storage (`tests/resumed.py`): DDP and DeepSpeed load what
they keep; FSDP2 creates the optimizer's state in a step without gradients, and loads into it; FSDP1 does too, and then
makes the state a second time.
"""

from dataclasses import dataclass, replace

from accel_fsdp.config import Engine
from accel_fsdp.job import Layout, Recipe
from accel_fsdp.models import optimizers, state_bytes
from accel_fsdp.prediction.memory import shards
from accel_fsdp.prediction.memory.shape import ModelShape
from accel_fsdp.prediction.memory.step import Prediction

FULL = "FULL_STATE_DICT"


@dataclass(frozen=True)
class Resume:
    """The most bytes while a checkpoint is loaded: of a GPU, and of the first machine's memory."""

    device: int
    host: int


def resumed(shape: ModelShape, recipe: Recipe, layout: Layout, step: Prediction, state_dict: str = "") -> Resume | None:
    """The peak of a resume of the job whose step is predicted; None for a mesh, whose loading was not followed."""
    if layout.is_by_transformers:
        return None
    kept, is_full = step.moments[0].total, state_dict == FULL  # parameters and the optimizer's state, no gradients
    update = next(moment.total for moment in step.moments if moment.phase == "optimizer step")
    device = max(kept, update) if layout.is_fsdp else kept  # FSDP creates the state in a step
    if layout.engine is Engine.FSDP1:
        device = max(device, *_fsdp1_bytes(shape, recipe, layout, kept, is_full))
    elif layout.engine is Engine.FSDP2 and is_full:
        width = shards.master_bytes(recipe, layout)
        device = max(device, kept + _largest_tensor(shape, recipe, layout) * width)  # broadcast from rank 0
    return Resume(device, _host_bytes(shape, recipe, layout, is_full))


def _fsdp1_bytes(shape: ModelShape, recipe: Recipe, layout: Layout, kept: int, is_full: bool) -> tuple[int, int]:
    """While weights are loaded, and while the optimizer's state is.

    A layer is gathered beside the root unit (`_pre_load_state_dict_hook`), and from a sharded checkpoint a second time.
    The new state of the optimizer exists beside the old one, and that of one tensor is gathered whole for it
    (`optim_state_dict_to_load`).
    """
    root, *layers = (
        shards.shard_bytes(unit, layout) * layout.shard_ranks for unit in shards.all_units(shape, recipe, layout)
    )
    _, states, _ = (0, 0, 0) if layout.offload else shards.resting_bytes(shape, recipe, layout)
    per_element = optimizers.element_bytes(recipe.optimizer, shards.master_bytes(recipe, layout))
    gathered = (root + max(layers)) * (1 if is_full else 2)
    return kept - states + gathered, kept + states + round(_largest_tensor(shape, recipe, layout) * per_element)


def _largest_tensor(shape: ModelShape, recipe: Recipe, layout: Layout) -> int:
    units = shards.all_units(shape, recipe, layout)
    return max(param.numel for unit in units for param in unit.parameters if param.trained)


def _host_bytes(shape: ModelShape, recipe: Recipe, layout: Layout, is_full: bool) -> int:
    """A full state dict is read by rank 0, its weights under FSDP1 by every rank; of other files each reads its part.

    Below stage 3, DeepSpeed's part is all weights.
    """
    whole = replace(layout, ranks=1, ranks_per_node=1)
    (stored, states, trained), own = (shards.resting_bytes(shape, recipe, ranks) for ranks in (whole, layout))
    weights = stored if recipe.method == "full" else trained
    if layout.engine is Engine.FSDP2:
        return max(weights, states) if is_full else 0
    if layout.engine is Engine.FSDP1:
        return max(weights * layout.ranks_per_node, states) if is_full else max(own[:2]) * layout.ranks_per_node
    if layout.engine is Engine.DEEPSPEED:
        master = shards.master_bytes(recipe, layout)
        module = weights * shards.compute_bytes(recipe) // master if layout.strategy < 3 else 0
        partition = (trained * state_bytes.MASTER // master + states) // layout.ranks
        return max(module, partition) * layout.ranks_per_node
    return weights * layout.ranks_per_node
