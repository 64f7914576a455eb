"""Repeats parts of a script in one process: a model's code without other ranks, and an optimizer's step."""

import contextlib
import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from accel_fsdp.ranks import parts

if TYPE_CHECKING:
    import torch


class Unrepeatable(Exception):
    """Why an update can't be repeated, as a sentence."""


def alone() -> contextlib.AbstractContextManager[Any]:
    """Raises `Unrepeatable` where code communicates with other ranks, which have ended their scripts."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class RefusedCommunication(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
                raise Unrepeatable("the model's forward communicates with other ranks")
            return func(*args, **(kwargs or {}))

    return RefusedCommunication()  # type: ignore[no-untyped-call]


Tensors: TypeAlias = "dict[str, torch.Tensor]"


def stepped(
    kind: type[Any],
    defaults: Mapping[str, Any],
    step: Mapping[str, Any],
    states: Sequence[Mapping[str, Any]],
    before: Tensors,
    used: Tensors,
) -> Tensors:
    """The weights after one step of a new optimizer with the recorded settings, states and gradients."""
    import torch

    weights = {name: torch.nn.Parameter(before[name].clone()) for names in step["names"] for name in names}
    accepted = inspect.signature(kind).parameters
    groups = [{"params": [weights[name] for name in names]} for names in step["names"]]
    optimizer = kind(groups, **{key: value for key, value in defaults.items() if key in accepted})
    for group, settings in zip(optimizer.param_groups, step["settings"], strict=True):
        group.update({key: value for key, value in settings.items() if value is not None})
    for name, weight in weights.items():
        weight.grad = used[name].to(weight.dtype) if name in used else None
        if state := _state(weight, [rank_states.get(name, {}) for rank_states in states]):
            optimizer.state[weight] = state
    optimizer.step()
    return {name: weight.detach() for name, weight in weights.items()}


def _state(weight: "torch.Tensor", of_ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for key in dict.fromkeys(key for rank_state in of_ranks for key in rank_state):
        values = [rank_state[key] for rank_state in of_ranks if key in rank_state]
        if isinstance(values[0], list):
            state[key] = parts.whole(weight.shape, key, [{key: value} for value in values])
        else:
            state[key] = values[0]
    return state
