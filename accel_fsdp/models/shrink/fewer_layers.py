"""Makes a config with fewer layers that still has each kind of layer of the real model."""

import re
from collections.abc import Hashable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from accel_fsdp.models.shrink.config_parts import DEPTHS, TOKENS, Part, as_list

if TYPE_CHECKING:
    from torch import nn


FEWEST = 2
FROM_THE_START = ("first_k_dense_replace", "num_dense_layers", "max_window_layers", "moe_layer_start_index")
FROM_THE_END = ("num_kv_shared_layers",)
NUMBERS_OF_LAYERS = re.compile(r"(ind(ex|ic|x)|idx|layers|layer_ids)")
FEATURE_LAYERS = re.compile(r"^(vision_feature_layers?|vit_layers)$")
"""Keys with the layers of the image encoder whose features are used; negative ones count from the last."""
NUMBER = re.compile(r"\d+")
PLACE = re.compile(r"idx|index|_id$|number")
"""Attributes with a layer's position, which differs for each layer."""


def take(part: Part, model: "nn.Module") -> None:
    """Keeps at least `FEWEST` layers of each stack, including each kind, and cuts lists of layers accordingly.

    `model` is the real one on the meta device. Layers that a config overrides one by one become like the others.
    """
    part.values.pop("per_layer_config", None)
    for key in part.keys(DEPTHS):
        if (depth := part.real[key]) > 1:
            layer_numbers = _kept_layers(part, model, depth)
            part.values[key] = len(layer_numbers)
            _cut_per_layer(part, depth, layer_numbers)


def _kept_layers(part: Part, model: "nn.Module", depth: int) -> list[int]:
    """The kept layers: one of each kind, and the first ones up to `FEWEST`."""
    kinds = kinds_of(model, depth)
    layer_numbers = {kinds.index(kind) for kind in kinds}
    if kinds and not _lists_kinds(part, depth):  # a period such as every second layer counts from the first
        layer_numbers = set(range(max(layer_numbers) + 1))
    layer_numbers |= {numbers[0] for _, numbers in _numbers_of_layers(part, depth)}
    others = (number for number in range(depth) if number not in layer_numbers)
    return sorted([*layer_numbers, *islice(others, max(0, FEWEST - len(layer_numbers)))])


def _lists_kinds(part: Part, depth: int) -> bool:
    """Whether layers in between can be left out: the config lists their kinds, or layers of another kind by number."""
    has_lists = any(isinstance(value, list) and len(value) == depth for value in part.real.values())
    counts = any(type(part.real.get(key)) is int for key in (*FROM_THE_START, *FROM_THE_END))
    return has_lists or counts


def _numbers_of_layers(part: Part, depth: int) -> Iterator[tuple[str, list[int]]]:
    """The keys that list layers by number."""
    for key, value in part.real.items():
        if (
            isinstance(value, list)
            and value
            and all(type(number) is int and 0 <= number < depth for number in value)
            and NUMBERS_OF_LAYERS.search(key)
            and not TOKENS.search(key)
            and len(set(value)) == len(value) < depth
        ):
            yield key, value


def _cut_per_layer(part: Part, depth: int, layer_numbers: Sequence[int]) -> None:
    """Cuts every per-layer setting, and those that list layers by number, to the kept layers."""
    for key, value in part.real.items():
        if isinstance(value, list) and len(value) == depth and not TOKENS.search(key):
            part.values[key] = [value[number] for number in layer_numbers]
        elif type(value) is int and key in FROM_THE_START:
            part.values[key] = sum(number < value for number in layer_numbers)
        elif type(value) is int and key in FROM_THE_END:
            part.values[key] = sum(number >= depth - value for number in layer_numbers)
    for key, numbers in _numbers_of_layers(part, depth):
        part.values[key] = [layer_numbers.index(number) for number in numbers if number in layer_numbers]


def keep_features(parts: Sequence[Part]) -> None:
    depths = [part.values[key] for part in parts if not part.main for key in part.keys(DEPTHS)]
    last = min(depths, default=0)
    for part in parts if last else ():
        for key, value in part.real.items():
            if FEATURE_LAYERS.search(key) and value is not None:
                layers = [max(-last, min(layer, last - 1)) for layer in as_list(value)]
                part.values[key] = layers if isinstance(value, list) else layers[0]


def kinds_of(model: "nn.Module", depth: int) -> list[Hashable]:
    """The kind of each layer, by its number: sliding or full attention, dense or with experts, and so on.

    Configs express this differently: a list with an entry for each layer, the number of first layers, a period. The
    modules of the built model show it in every case. A kind is over all stacks of `depth` layers; the list is empty if
    there is no such stack.
    """
    from torch import nn

    stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == depth]
    return [tuple(_kind(stack[number]) for stack in stacks) for number in range(depth)] if stacks else []


def all_kinds(model: "nn.Module") -> set[Hashable]:
    from torch import nn

    lists = ((name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList))
    return {(NUMBER.sub("N", name), _kind(layer)) for name, stack in lists for layer in stack}


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
