"""Walks through a module's outputs: tensors in dictionaries, tuples, lists and dataclasses."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

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
