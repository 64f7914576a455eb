"""The record of an update on a rank: only numbers, texts and tensors, which `torch.load(weights_only=True)` reads."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from accel_fsdp.ranks.parts import Parts, Place

if TYPE_CHECKING:
    import torch

PLAIN = (bool, int, float, str, type(None))


class Unrecordable(Exception):
    """Why an update can't be recorded, as a sentence."""


@dataclass
class Forward:
    """One outermost forward pass: `module` is its path in the model, `gradients` those of its outputs, in order.

    `outputs` has the values of the outputs that may have gradients. `loss` is the number of the output that the model
    itself calls its loss, `evaluating` the modules in that mode, `buffers` those that have changed, None for rank 0's.
    """

    model: int
    module: str
    inputs: Any
    random: "torch.Tensor"
    evaluating: list[str]
    gradients: "list[torch.Tensor | None]" = field(default_factory=list)
    outputs: "dict[int, torch.Tensor]" = field(default_factory=dict)
    buffers: "dict[str, torch.Tensor] | None" = field(default_factory=dict)
    loss: int | None = None


@dataclass
class Step:
    """One step of an optimizer: the names of weights and the settings of each group, and its states before the step."""

    names: list[list[str]]
    settings: list[dict[str, Any]]
    states: "dict[str, dict[str, Any]]"
    line: str
    has_hooks: bool = False


@dataclass
class Clip:
    """A call that clips gradients to a norm. `backwards`: how many backward passes of the update came before."""

    most: float
    norm: float
    backwards: int
    line: str


@dataclass
class Update:
    """`weights` and `after` are the weights' parts before and after the update.

    `reduced` are the gradients after the last backward pass, `used` those at the optimizers' steps. `divisor`: the
    number by which the script lets FSDP2 divide the sum over ranks, 0 for the number of ranks. `cast`: the dtype to
    which FSDP casts weights for a forward pass, `reduces`: that in which it reduces gradients. `dropped`: whether
    gradients were cleared between two backward passes, `midway`: whether it stepped before the last batch of a prepared
    dataloader, `unprepared`: whether before the last one of a step, with gradients that were kept on each rank;
    `unsharded`: the weights in no unit of FSDP; `scaled`: whether the script has a GradScaler.

    Lines of the script: `line` of the last backward pass, `unsynced` of what kept gradients on each rank. `why`: the
    reason why it can't be repeated; or empty.
    """

    weights: Parts
    trained: list[str]
    precision: str
    cast: str
    reduces: str
    forwards: list[Forward] = field(default_factory=list)
    reduced: Parts = field(default_factory=dict)
    used: Parts = field(default_factory=dict)
    after: Parts = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    clips: list[Clip] = field(default_factory=list)
    backwards: int = 0
    divisor: float = 0.0
    accumulation: int = 1
    line: str = ""
    dropped: bool = False
    midway: bool = False
    unprepared: bool = False
    scaled: bool = False
    unsharded: list[str] = field(default_factory=list)
    unsynced: str = ""
    why: str = ""


def united(updates: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds to the first rank's update the names of trained weights, and of each optimizer's, that only others hold.

    Gives the buffers that DDP sends from rank 0 to the others' forward passes.
    """
    first = updates[0]
    for update in updates:
        for forward, first_forward in zip(update["forwards"], first["forwards"], strict=False):
            forward["buffers"] = first_forward["buffers"] if forward["buffers"] is None else forward["buffers"]
    first["trained"] = list(dict.fromkeys(name for update in updates for name in update["trained"]))
    for of_ranks in zip(*(update["steps"] for update in updates), strict=False):
        groups = zip(*(step["names"] for step in of_ranks), strict=True)
        of_ranks[0]["names"] = [list(dict.fromkeys(name for names in group for name in names)) for group in groups]
    return updates


def recorded(value: Any) -> Any:
    """A copy of a forward pass's inputs; raises `Unrecordable` for a value that a file of tensors can't hold."""
    import torch

    if isinstance(value, PLAIN):
        return value
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        return value.detach().cpu().clone().requires_grad_(value.requires_grad)
    if isinstance(value, Mapping):
        return {key: recorded(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [recorded(inner) for inner in value]
    raise Unrecordable(f"the model's forward takes a {type(value).__name__}")


def states_of(state: Mapping[str, Any], place: Place) -> dict[str, Any]:
    """An optimizer's states of a weight: its part of those with a value for each element, and single numbers."""
    import torch

    kept: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.dim() and value.shape == place.parameter.shape:
            kept[key] = [place.start, place.part(value)]
        else:
            with contextlib.suppress(Unrecordable):
                kept[key] = recorded(value)
    return kept


def setting(value: Any) -> Any:
    try:
        return recorded(value)
    except Unrecordable:
        return None
