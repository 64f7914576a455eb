"""Observes losses that a number replaces before backward, as NaN is hidden: they give no gradient."""

import sys
from typing import TYPE_CHECKING, Any

from accel_fsdp.ranks import events, script

if TYPE_CHECKING:
    import torch

MOST_NODES = 16
"""The nodes between a loss and what replaces it: the loss may be scaled in between."""


class HiddenNan:
    """Counts backward passes whose whole loss is such a number, and those at the end of the run in a row."""

    def __init__(self) -> None:
        self.passes = self.hidden = self.in_a_row = 0
        self.line = self.by = ""

    def before_backward(self, loss: "torch.Tensor") -> None:
        self.passes += 1
        by = _replaced_by(loss)
        self.hidden += by is not None
        self.in_a_row = self.in_a_row + 1 if by is not None else 0
        if by is not None and not self.line:
            self.by, line = by, script.line_of_stack(sys._getframe(3))
            self.line = script.line_above(line, by) if by else line

    def report_end(self) -> None:
        if self.hidden:
            counts = {"passes": self.passes, "hidden": self.hidden, "in_a_row": self.in_a_row}
            events.report("hidden-nan", **counts, by=self.by, line=self.line)


def _replaced_by(loss: "torch.Tensor") -> str | None:
    """The function of torch that leaves nothing of a loss but a number; empty if it is one from the start."""
    node: Any = loss.grad_fn
    for _ in range(MOST_NODES):
        if node is None or _is_number(getattr(node, "variable", None)):
            return ""
        following = [inner for inner, _ in node.next_functions if inner is not None]
        if len(following) != 1:
            return None
        match node.name():
            case "NanToNumBackward0" if not node._saved_self.isfinite().any():
                return "nan_to_num"
            case "WhereBackward0" if bool((node._saved_condition == (node.next_functions[0][0] is None)).all()):
                return "where"
            case "MaskedFillBackward0" if node.next_functions[0][0] is not None and node._saved_mask.all():
                return "masked_fill"
        node = following[0]
    return None


def _is_number(leaf: Any) -> bool:
    """Whether a leaf of autograd's graph is a number that the script made, not a weight."""
    import torch

    return isinstance(leaf, torch.Tensor) and not isinstance(leaf, torch.nn.Parameter) and leaf.numel() == 1
