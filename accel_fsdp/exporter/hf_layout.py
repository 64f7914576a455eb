"""Models whose files differ in layout from the model in memory, such as one tensor per expert.

transformers converts between the two layouts. It is called for one layer at a time, so that memory holds a single
layer.
"""

import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_fsdp.checkpoints import DTYPES, FileReader, Source
from accel_fsdp.errors import UserError
from accel_fsdp.exporter import transformers_probe
from accel_fsdp.exporter.safetensors_writer import torch_dtype, whole
from accel_fsdp.exporter.transformers_probe import Description

if TYPE_CHECKING:
    import torch

LAYER = re.compile(r"^.*?\.\d+\.")


class Conversion:
    """Makes the tensors of files from those of one layer, and keeps them until another layer is asked for."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._lock = threading.Lock()
        self._layer: Mapping[str, Source] = {}
        self._content: dict[str, torch.Tensor] = {}

    def of(self, layer: Mapping[str, Source], reader: FileReader) -> "dict[str, torch.Tensor]":
        with self._lock:
            if self._layer is not layer:
                self._content = {}
                self._content = _convert(self.model, {name: whole(reader, source) for name, source in layer.items()})
                self._layer = layer
            return self._content


@dataclass(frozen=True)
class Converted:
    name: str
    dtype: str
    shape: tuple[int, ...]
    layer: Mapping[str, Source]
    conversion: Conversion
    unit: int = 1

    def read(self, reader: FileReader, start: int, stop: int, buffer: memoryview) -> None:
        import torch

        elements = self.conversion.of(self.layer, reader)[self.name].reshape(-1)[start:stop].contiguous()
        torch.frombuffer(buffer, dtype=elements.dtype).copy_(elements)


def converted(tensors: Mapping[str, Source], description: Description, folder: Path) -> dict[str, Source]:
    """All tensors in the layout of files; those that need no conversion are returned unchanged."""
    import torch

    conversion = Conversion(transformers_probe.build(folder))
    groups: dict[str, dict[str, Source]] = {}
    for name, source in tensors.items():
        layer_match = LAYER.match(name)
        groups.setdefault(layer_match[0] if layer_match else "", {})[name] = source
    sources: dict[str, Source] = {}
    for group in groups.values():
        blank = {
            name: torch.empty(source.shape, dtype=torch_dtype(source.dtype), device="meta")
            for name, source in group.items()
        }
        for name, tensor in _convert(conversion.model, blank).items():
            unchanged = group[name] if blank.get(name) is tensor else None
            dtype = DTYPES[str(tensor.dtype).removeprefix("torch.")]
            sources[name] = unchanged or Converted(name, dtype, tuple(tensor.shape), group, conversion)
    if {name: source.shape for name, source in sources.items()} != description.files:
        raise UserError(
            f"the layout of {type(conversion.model).__name__}'s files can't be made layer by layer",
            why="its conversion joins tensors of several layers",
            fix="export at the end of training with FULL_STATE_DICT, or load the checkpoint and save_pretrained it",
        )
    return sources


def _convert(model: Any, tensors: "dict[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
    from transformers.core_model_loading import revert_weight_conversion

    files: dict[str, torch.Tensor] = revert_weight_conversion(model, tensors)
    return files
