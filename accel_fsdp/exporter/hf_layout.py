"""Models whose files differ in layout from the model in memory, such as one tensor per expert.

transformers converts between the two layouts. It is called for one layer at a time, so that memory holds a single
layer.
"""

import re
from collections.abc import Mapping
from functools import lru_cache

import torch

from accel_fsdp.checkpoints import Stored
from accel_fsdp.errors import UserError
from accel_fsdp.exporter import exported_folder
from accel_fsdp.exporter.transformers_probe import Description

LAYER = re.compile(r"^.*?\.\d+\.")


def converted(tensors: Mapping[str, Stored], description: Description) -> dict[str, Stored]:
    """All tensors in the layout of files; those that need no conversion are returned unchanged."""
    layers: dict[str, dict[str, Stored]] = {}
    for name, stored in tensors.items():
        match = LAYER.match(name)
        layers.setdefault(match[0] if match else "", {})[name] = stored

    @lru_cache(maxsize=1)
    def loaded(layer: str) -> dict[str, torch.Tensor]:
        content = {name: stored.load() for name, stored in layers[layer].items()}
        return exported_folder.as_saved(description.model, content)

    sources: dict[str, Stored] = {}
    for layer, group in layers.items():
        blank = {name: torch.empty(s.shape, dtype=s.dtype, device="meta") for name, s in group.items()}
        for name, tensor in exported_folder.as_saved(description.model, blank).items():

            def load(layer: str = layer, name: str = name) -> torch.Tensor:
                return loaded(layer)[name]

            is_same = blank.get(name) is tensor
            sources[name] = group[name] if is_same else Stored(tuple(tensor.shape), tensor.dtype, load)
    if {name: source.shape for name, source in sources.items()} != description.files:
        raise UserError(
            f"the layout of {type(description.model).__name__}'s files can't be made layer by layer",
            why="its conversion joins tensors of several layers",
            fix="export at the end of training with FULL_STATE_DICT, or load the checkpoint and save_pretrained it",
        )
    return sources
