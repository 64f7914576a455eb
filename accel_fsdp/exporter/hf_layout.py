"""Models whose files differ in layout from the model in memory, such as one tensor per expert.

transformers converts between the two layouts. It is called for one layer at a time, so that memory holds a single
layer.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from accel_fsdp.checkpoints import Stored
from accel_fsdp.errors import UserError
from accel_fsdp.exporter import transformers_probe
from accel_fsdp.exporter.transformers_probe import Description

LAYER = re.compile(r"^.*?\.\d+\.")


class _Conversion:
    """Makes the tensors of files from those of one layer, and keeps them until another layer is asked for."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._layer: Mapping[str, Stored] = {}
        self._content: dict[str, torch.Tensor] = {}

    def of(self, layer: Mapping[str, Stored], name: str) -> torch.Tensor:
        if self._layer is not layer:
            self._content = {}
            self._content = _convert(self.model, {name: stored.load() for name, stored in layer.items()})
            self._layer = layer
        return self._content[name]


def converted(tensors: Mapping[str, Stored], description: Description, folder: Path) -> dict[str, Stored]:
    """All tensors in the layout of files; those that need no conversion are returned unchanged."""
    conversion = _Conversion(transformers_probe.build(folder))
    groups: dict[str, dict[str, Stored]] = {}
    for name, stored in tensors.items():
        layer_match = LAYER.match(name)
        groups.setdefault(layer_match[0] if layer_match else "", {})[name] = stored
    sources: dict[str, Stored] = {}
    for group in groups.values():
        blank = {name: torch.empty(s.shape, dtype=s.dtype, device="meta") for name, s in group.items()}
        for name, tensor in _convert(conversion.model, blank).items():
            sources[name] = group[name] if blank.get(name) is tensor else _of(conversion, group, name, tensor)
    if {name: source.shape for name, source in sources.items()} != description.files:
        raise UserError(
            f"the layout of {type(conversion.model).__name__}'s files can't be made layer by layer",
            why="its conversion joins tensors of several layers",
            fix="export at the end of training with FULL_STATE_DICT, or load the checkpoint and save_pretrained it",
        )
    return sources


def _of(conversion: _Conversion, layer: Mapping[str, Stored], name: str, blank: torch.Tensor) -> Stored:
    return Stored(tuple(blank.shape), blank.dtype, lambda: conversion.of(layer, name))


def _convert(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    files: dict[str, torch.Tensor] = revert_weight_conversion(model, tensors)
    return files
