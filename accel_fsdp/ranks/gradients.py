"""Observes the gradients of optimizers: whether a script clears them between two steps, or leaves some to an epoch."""

import sys
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accel_fsdp.ranks import events, parts, script
from accel_fsdp.ranks.weights import checksum

if TYPE_CHECKING:
    from accel_fsdp.ranks.drawn_rows import ObservedRows


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


def _checksum(parameter: Any) -> int:
    local = None if parameter is None else nonzero_part(parameter)
    return CLEARED if local is None else checksum(local)


class LeftoverGradients:
    """Counts the backward passes of each step, of a script with one optimizer.

    It reports steps that take the usual passes and those that the epoch before has left. In scripts whose count goes on
    over epochs each step takes as many.
    """

    def __init__(self, drawn: "ObservedRows") -> None:
        self.drawn = drawn
        self.epoch: Any = None
        self.optimizer: Any = None
        self.passes = self.left = 0
        self.counts: list[int] = []
        self.is_over = False

    def before_backward(self) -> None:
        last, self.epoch = self.epoch, self.drawn.last or self.epoch
        if self.is_over or last is None or last is self.epoch or last.loader is not self.epoch.loader:
            return
        if self.passes and self.optimizer is not None and first_nonzero(self.optimizer) is not None:
            self.left = self.passes
        else:
            self.passes, self.counts = 0, self.counts[:-1]  # an epoch's last step may take fewer

    def ran_backward(self) -> None:
        self.passes += 1

    def before_step(self, optimizer: Any) -> None:
        self.is_over |= self.optimizer not in (None, optimizer)
        self.optimizer = optimizer
        usual = set(self.counts)
        if self.left and not self.is_over and usual == {self.passes - self.left}:
            line = script.line_of_stack(sys._getframe(2))
            events.report("left-over", passes=self.passes, usual=usual.pop(), line=line)
            self.is_over = True
        elif not self.left:
            self.counts.append(self.passes)
        self.passes = self.left = 0
