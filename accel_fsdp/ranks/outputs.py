"""Walks through a module's outputs, tensors in containers of any kind, and through the graph of a loss."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch


def tensors_in(value: Any) -> "Iterator[torch.Tensor]":
    """Yields the tensors in a module's output, in an order that is the same each time."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    for _, inner in members(value):
        yield from tensors_in(inner)


def members(value: Any) -> list[tuple[Any, Any]]:
    """The keys and values of a container; none for any other value."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    return [(field.name, getattr(value, field.name)) for field in fields(value)] if is_dataclass(value) else []


def with_member(container: Any, key: Any, value: Any) -> Any:
    """The container with a replaced member: itself, unless it is a tuple. A read-only container stays unchanged."""
    if isinstance(container, tuple):
        changed = [*container[:key], value, *container[key + 1 :]]
        return container._make(changed) if hasattr(container, "_make") else type(container)(changed)
    with contextlib.suppress(Exception):  # a dataclass with slots, or any error of the user's class
        if isinstance(container, Mapping | list):
            container[key] = value  # type: ignore[index]
        else:
            vars(container)[key] = value
    return container


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
