"""Finds the kinds of layers in a stack: sliding or full attention, dense or with experts, and so on.

Configs express this differently: a list with an entry for each layer, the number of first layers, a period. The modules
of the built model show it in every case.
"""

import re
from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

NUMBER = re.compile(r"\d+")
PLACE = re.compile(r"idx|index|_id$|number")
"""Attributes with a layer's position, which differs for each layer."""


def kinds(model: "nn.Module", depth: int) -> list[Hashable]:
    """The kind of each layer, by its number, over all stacks of `depth` layers; empty if there is no such stack."""
    stacks = list(_stacks(model, depth))
    return [tuple(_kind(stack[number]) for stack in stacks) for number in range(depth)] if stacks else []


def all_kinds(model: "nn.Module") -> set[Hashable]:
    from torch import nn

    lists = ((name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList))
    return {(NUMBER.sub("N", name), _kind(layer)) for name, stack in lists for layer in stack}


def first_of_each(kinds: Sequence[Hashable]) -> list[int]:
    return sorted({kind: number for number, kind in reversed(list(enumerate(kinds)))}.values())


def _stacks(model: "nn.Module", depth: int) -> Iterator["nn.ModuleList"]:
    from torch import nn

    return (module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == depth)


def _kind(layer: "nn.Module") -> Hashable:
    """The layer's modules with their classes, parameter names and settings of kind; no sizes."""
    return frozenset(
        (NUMBER.sub("N", name), type(module).__name__, _traits(module)) for name, module in layer.named_modules()
    )


def _traits(module: "nn.Module") -> Hashable:
    traits = {name: value for name, value in vars(module).items() if not name.startswith("_") and name != "training"}
    words = [(name, value) for name, value in traits.items() if isinstance(value, (bool, str))]
    numbers = [
        (name, "none" if value is None else "some" if value else "zero")
        for name, value in traits.items()
        if (value is None or type(value) is int) and not PLACE.search(name)
    ]
    parameters = [(name, value is None) for name, value in module._parameters.items()]
    return frozenset([*words, *numbers, *parameters])
