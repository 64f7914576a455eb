"""Observes gradients that are left at the end of an epoch, and that the next epoch's first step takes as well."""

import sys
from typing import TYPE_CHECKING, Any

from accel_fsdp.launch.ranks import events, script
from accel_fsdp.launch.ranks.gradients import first_nonzero

if TYPE_CHECKING:
    from accel_fsdp.launch.ranks.drawn_rows import ObservedRows


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
