"""Observes the gradients of optimizers: whether a script clears them between two steps."""

import sys
import weakref
from dataclasses import dataclass
from typing import Any

from accel_fsdp.launch.ranks import events, parts, script
from accel_fsdp.launch.ranks.weights import checksum

CLEARED = -1
"""Stands for the checksum of a gradient that is None or 0."""
MOST_STEPS = 4
"""The first steps of an optimizer, in which its gradients are observed."""


@dataclass
class _Tracked:
    """One gradient of an optimizer: its checksum at its last use, and the events since the last step."""

    parameter: Any
    used: int
    steps: int = 1
    backwards: int = 0
    is_kept: bool = True


class ObservedGradients:
    """Compares a gradient before each backward pass with its value after the last pass or step.

    Changed values, zeros and None mean that the script has cleared it. The verdict is at the optimizer's next step,
    because passes for another optimizer's loss may come before the script clears it.
    """

    def __init__(self) -> None:
        self.tracked: dict[int, _Tracked] = {}

    def before_backward(self, *_: Any, **__: Any) -> None:
        for gradient in self.tracked.values():
            now = _checksum(gradient.parameter())
            gradient.is_kept = gradient.is_kept and now == gradient.used and now != CLEARED

    def ran_backward(self) -> None:
        for gradient in self.tracked.values():
            gradient.backwards += 1
            if gradient.is_kept:
                gradient.used = _checksum(gradient.parameter())

    def before_step(self, optimizer: Any) -> None:
        """Called before each step of an optimizer."""
        last = self.tracked.pop(id(optimizer), None)
        if last and last.backwards and last.parameter() is not None:
            line = script.line_of_stack(sys._getframe(2))
            events.report("gradients", kept=last.is_kept, step=last.steps + 1, line=line)
        steps = last.steps + 1 if last else 1
        parameter = first_nonzero(optimizer) if steps < MOST_STEPS else None
        if parameter is not None:
            self.tracked[id(optimizer)] = _Tracked(weakref.ref(parameter), _checksum(parameter), steps)


def first_nonzero(optimizer: Any) -> Any:
    """The first parameter whose gradient isn't 0 on this rank; None if there is none."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return next((parameter for parameter in parameters if nonzero_part(parameter) is not None), None)


def nonzero_part(parameter: Any) -> Any:
    """This rank's part of a gradient; None without a gradient, or for zeros."""
    local_part = parts.local(parameter.grad)
    return local_part if local_part is not None and not local_part.is_sparse and bool(local_part.any()) else None


def checksum_of(model: Any) -> int:
    """One checksum of the gradients that a model outside of DDP and FSDP has on this rank; 0 for none, or zeros."""
    checksums = [_checksum(parameter) for parameter in model.parameters()]
    return hash(tuple(checksums)) if any(value != CLEARED for value in checksums) else 0


def _checksum(parameter: Any) -> int:
    local = None if parameter is None else nonzero_part(parameter)
    return CLEARED if local is None else checksum(local)
