"""Observes losses that are NaN and given to backward as a number, by `nan_to_num`: their gradients are 0."""

import sys
from typing import TYPE_CHECKING, Any

from accel_fsdp.launch.ranks import events, script

if TYPE_CHECKING:
    import torch

REPLACES_NAN = "NanToNumBackward0"
"""The node of `nan_to_num` in autograd's graph."""
MOST_NODES = 16
"""The nodes between a loss and its `nan_to_num`: the loss may be scaled in between."""


class HiddenNan:
    """Counts backward passes whose whole loss is such a number, and those at the end of the run in a row."""

    def __init__(self) -> None:
        self.passes = self.hidden = self.in_a_row = 0
        self.line = ""

    def before_backward(self, loss: "torch.Tensor") -> None:
        self.passes += 1
        is_hidden = _hides_nan(loss)
        self.hidden += is_hidden
        self.in_a_row = self.in_a_row + 1 if is_hidden else 0
        if is_hidden and not self.line:
            self.line = script.line_above(script.line_of_stack(sys._getframe(3)), "nan_to_num")

    def report_end(self) -> None:
        if self.hidden:
            events.report("hidden-nan", passes=self.passes, hidden=self.hidden, in_a_row=self.in_a_row, line=self.line)


def _hides_nan(loss: "torch.Tensor") -> bool:
    """Whether a loss depends on nothing but a `nan_to_num` of values that are all NaN or infinite."""
    node: Any = loss.grad_fn
    for _ in range(MOST_NODES):
        if node is None:
            return False
        if node.name() == REPLACES_NAN:
            return not bool(node._saved_self.isfinite().any())
        following = [inner for inner, _ in node.next_functions if inner is not None]
        if len(following) != 1:
            return False
        node = following[0]
    return False
