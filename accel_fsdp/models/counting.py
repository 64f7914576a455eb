"""Counts a model's parameters; an element of a packed 4-bit tensor holds several."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

PACKED = "Linear4bit"
"""The layer of bitsandbytes, whose `weight` is packed. The weight's own class is lost when FSDP shards it."""


def numel(parameter: "nn.Parameter") -> int:
    """The number of elements of a whole parameter, also if DeepSpeed partitioned it while loading the model."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def shape(parameter: "nn.Parameter") -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def embeddings(model: "nn.Module") -> set["nn.Parameter"]:
    """The tables of token or position embeddings, which a head may share."""
    from torch import nn

    tables = (layer for layer in model.modules() if isinstance(layer, nn.Embedding))
    return {parameter for table in tables for parameter in table.parameters(recurse=False)}


def per_element(layer: "nn.Module", name: str, parameter: "nn.Parameter") -> int:
    """The weights in one element of a layer's parameter: two in each byte of a packed one."""
    packed = name == "weight" and any(kind.__name__ == PACKED for kind in type(layer).__mro__)
    return 2 * parameter.element_size() if packed else 1


def packing(model: "nn.Module") -> dict["nn.Parameter", int]:
    """Every parameter of a model once, with the number of weights in one of its elements."""
    elements = {}
    for layer in model.modules():
        for name, parameter in layer.named_parameters(recurse=False):
            elements[parameter] = per_element(layer, name, parameter)
    return elements


def weights(model: "nn.Module") -> dict["nn.Parameter", int]:
    return {parameter: numel(parameter) * per_element for parameter, per_element in packing(model).items()}
