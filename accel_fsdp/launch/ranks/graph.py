"""Walks the graph of a loss: whether it depends on recorded forward passes, and on weights in other ways."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch


class Reached(NamedTuple):
    """`outputs`: whether a loss depends on outputs of recorded forward passes.

    `weight` is a weight on which it depends other than through these, or empty.
    """

    outputs: bool
    weight: str


def reached(roots: "Iterable[torch.Tensor]", boundary: Iterable[Any], names: Mapping[int, str]) -> Reached:
    """Walks from the roots to the `boundary`, the nodes of the outputs, and to leaves; `names` are those of weights.

    Other leaves are tensors of the script, such as the representations of which a cache takes gradients.
    """
    import torch

    ends, outputs = {id(node) for node in boundary}, False
    seen: dict[int, Any] = {}  # keeps the nodes alive, so that no other node gets the id of a seen one
    nodes = [root.grad_fn for root in roots if root.grad_fn is not None]
    while nodes:
        node = nodes.pop()
        if id(node) in ends:
            outputs = True
        elif id(node) not in seen:
            seen[id(node)] = node
            leaf = getattr(node, "variable", None)
            if isinstance(leaf, torch.nn.Parameter) or id(leaf) in names:
                return Reached(outputs, names.get(id(leaf), "a weight"))  # FSDP2's unsharded weight has no name
            nodes += [inner for inner, _ in node.next_functions if inner is not None]
    return Reached(outputs, "")
