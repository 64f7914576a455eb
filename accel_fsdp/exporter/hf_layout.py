"""Models whose files have another layout than the model in memory, such as one tensor per expert.

transformers knows how to turn one into the other. It is asked for one layer at a time, so that memory holds a layer.
"""

import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
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


@dataclass
class Layer:
    """The tensors of one layer, and what they become in files; kept until the next layer is asked for."""

    tensors: Mapping[str, Source]
    model: Any
    shared: "Shared"

    def made(self, reader: FileReader) -> "dict[str, torch.Tensor]":
        with self.shared.lock:
            if self.shared.layer is not self:
                self.shared.content = {}
                self.shared.content = _convert(
                    self.model, {name: whole(reader, source) for name, source in self.tensors.items()}
                )
                self.shared.layer = self
            return self.shared.content


@dataclass
class Shared:
    lock: Any = field(default_factory=threading.Lock)
    layer: Layer | None = None
    content: "dict[str, torch.Tensor]" = field(default_factory=dict)


@dataclass(frozen=True)
class Converted:
    name: str
    dtype: str
    shape: tuple[int, ...]
    layer: Layer
    unit: int = 1

    def read(self, reader: FileReader, start: int, stop: int, buffer: memoryview) -> None:
        import torch

        elements = self.layer.made(reader)[self.name].reshape(-1)[start:stop].contiguous()
        torch.frombuffer(buffer, dtype=elements.dtype).copy_(elements)


def converted(tensors: Mapping[str, Source], description: Description, folder: Path) -> dict[str, Source]:
    """All tensors in the layout of files; those that stay as they are are not touched."""
    import torch

    model, shared = transformers_probe.build(folder), Shared()
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
        layer = Layer(group, model, shared)
        for name, tensor in _convert(model, blank).items():
            kept = group[name] if blank.get(name) is tensor else None
            dtype = DTYPES[str(tensor.dtype).removeprefix("torch.")]
            sources[name] = kept or Converted(name, dtype, tuple(tensor.shape), layer)
    if {name: source.shape for name, source in sources.items()} != description.files:
        raise UserError(
            f"the layout of {type(model).__name__}'s files can't be made layer by layer",
            why="its conversion joins tensors of several layers",
            fix="export at the end of training with FULL_STATE_DICT, or load the checkpoint and save_pretrained it",
        )
    return sources


def _convert(model: Any, tensors: "dict[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
    from transformers.core_model_loading import revert_weight_conversion

    files: dict[str, torch.Tensor] = revert_weight_conversion(model, tensors)
    return files
