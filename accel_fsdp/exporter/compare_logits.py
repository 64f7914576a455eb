"""Compares the logits of an export with those of its checkpoint, assembled by the library that wrote it.

torch's and DeepSpeed's own readers load untrusted pickles, and look for files at fixed paths. So this
comparison shares the export's readers of files, but none of its processing: torch gets the chunks of a tensor,
DeepSpeed a rewritten folder. It holds two models in memory, and runs in the second process.
"""

import copy
import tempfile
from contextlib import closing
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_fsdp.checkpoints import (
    ITEM_BYTES,
    MODEL_KEYS,
    CheckpointLocation,
    FileReader,
    Inert,
    View,
    clean_name,
    dcp,
    deepspeed,
    file_names,
    open_checkpoint,
    tensor_names,
    torch_zip,
)
from accel_fsdp.exporter import exported_folder, transformers_probe
from accel_fsdp.exporter.companion_files import CompanionFiles
from accel_fsdp.exporter.safetensors_writer import torch_dtype, whole
from accel_fsdp.models import model_class, part_for, read_config

if TYPE_CHECKING:
    import torch
    from torch import nn

TOKENS = 16
MODEL_STATE = (
    *("buffer_names", "module", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params"),
    *("ds_version", "mp_world_size", "dp_world_size"),
)
OPTIMIZER_STATE = (
    *("zero_stage", "partition_count", "fp32_flat_groups", "single_partition_of_fp32_groups"),
    "param_alignment_paddings",
)
"""Keys that DeepSpeed's conversion reads from its files."""


def difference(folder: Path, checkpoint: CheckpointLocation, companions: CompanionFiles) -> tuple[float, float]:
    import torch

    config = read_config(str(folder))
    kind = model_class(config)
    exported = kind.from_pretrained(folder, config=copy.deepcopy(part_for(kind, config)), trust_remote_code=False)
    tokens = torch.arange(1, TOKENS + 1).remainder(config.get_text_config().vocab_size)[None]
    with torch.inference_mode():
        exported_logits = exported.eval()(tokens).logits.float()
        with closing(FileReader()) as reader:
            original = _Original(checkpoint, companions, reader, folder).model(kind, config, exported.dtype)
        for parameter in original.parameters():  # models keep buffers, such as rotary frequencies, in float32
            parameter.data = parameter.data.to(exported.dtype)
        original_logits = original.eval()(tokens).logits.float()
    return float((exported_logits - original_logits).abs().max()), float(original_logits.abs().max())


@dataclass(frozen=True)
class _Original:
    """The checkpoint's model, to compare with; `room` is a temporary folder for files that have to be rewritten."""

    checkpoint: CheckpointLocation
    companions: CompanionFiles
    reader: FileReader
    room: Path

    def model(self, kind: Any, config: Any, dtype: "torch.dtype") -> "nn.Module":
        if self.checkpoint.kind == "safetensors":
            return _model_of_files(kind, config, self._files(self.checkpoint.weights), "auto")
        if self.companions.adapter is not None:
            return self._with_adapter(kind, config, dtype)
        model = kind(config)
        state = tensor_names.unprefixed(self._state(), model.state_dict())
        for group in exported_folder.ties_of(model):
            if present := [name for name in group if name in state]:
                state |= dict.fromkeys(group, state[present[0]])
        model.load_state_dict(state, strict=False)
        return model  # type: ignore[no-any-return]

    def _with_adapter(self, kind: Any, config: Any, dtype: "torch.dtype") -> "nn.Module":
        """The base with the adapter merged: in float32 for a float32 export, else in the base's dtype."""
        import torch
        from peft import get_peft_model, set_peft_model_state_dict

        state = self._files(self.companions.folder)
        stored = next((tensor.dtype for tensor in state.values() if tensor.is_floating_point()), torch.float32)
        base = _model_of_files(kind, config, state, dtype if dtype is torch.float32 else stored)
        model = get_peft_model(base, transformers_probe.peft_settings(self.companions.settings))
        adapter = open_checkpoint.of_file(self.checkpoint.weights) if self.checkpoint.kind == "adapter" else {}
        state = {name: whole(self.reader, tensor) for name, tensor in adapter.items()} or self._state()
        set_peft_model_state_dict(model, state)
        return model.merge_and_unload()  # type: ignore[no-any-return]

    def _files(self, place: Path) -> "dict[str, torch.Tensor]":
        return {name: whole(self.reader, tensor) for name, tensor in open_checkpoint.of_place(place).items()}

    def _state(self) -> "dict[str, torch.Tensor]":
        state: dict[str, Any]
        if self.checkpoint.kind == "ZeRO":
            return _zero_weights(self.checkpoint.weights, self.reader, self.room)
        if self.checkpoint.kind == "sharded (DCP)":
            paths = _dcp_tensors(self.checkpoint.weights, self.reader)
            nested = {path[-1]: value for path, value in paths.items() if set(path[:-1]) <= MODEL_KEYS and path[:-1]}
            state = nested or {path[-1]: value for path, value in paths.items() if len(path) == 1}
        else:
            state = _with_tensors(torch_zip.load(self.reader, self.checkpoint.weights), self.reader)
            while inner := next((key for key in state if key in MODEL_KEYS), None):
                state = state[inner]
        return {clean_name(name).removeprefix("module."): tensor for name, tensor in state.items()}


def _model_of_files(kind: Any, config: Any, state: "dict[str, torch.Tensor]", dtype: Any) -> "nn.Module":
    """The model that `from_pretrained` builds from these tensors, by their names in files."""
    options = {"config": config, "state_dict": state, "dtype": dtype}
    return kind.from_pretrained(None, **options, trust_remote_code=False)  # type: ignore[no-any-return]


def _tensor(reader: FileReader, view: View) -> "torch.Tensor":
    import torch

    piece = view.piece((0,) * len(view.shape))
    needed = 1 + sum((size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True))
    if not prod(view.shape):
        return torch.empty(view.shape, dtype=torch_dtype(view.dtype))
    content = bytearray(needed * ITEM_BYTES[view.dtype])
    reader.read(piece.record, piece.skip, memoryview(content))
    return torch.frombuffer(content, dtype=torch_dtype(view.dtype)).as_strided(view.shape, view.strides)


def _with_tensors(value: Any, reader: FileReader) -> Any:
    """The value with tensors for `View`s, sizes for tuples of numbers, and None for other `Inert` objects."""
    import torch

    if isinstance(value, View):
        return _tensor(reader, value)
    if isinstance(value, dict):
        return {key: _with_tensors(part, reader) for key, part in value.items() if not isinstance(key, Inert)}
    if isinstance(value, tuple) and all(type(part) is int for part in value):
        return torch.Size(value)
    if isinstance(value, (list, tuple)):
        return [_with_tensors(part, reader) for part in value]
    return None if isinstance(value, Inert) else value


def _dcp_tensors(folder: Path, reader: FileReader) -> "dict[tuple[str, ...], torch.Tensor]":
    """The tensors of a distributed checkpoint by path, each assembled from its chunks by torch."""
    import torch

    tensors: dict[tuple[str, ...], torch.Tensor] = {}
    for entry in dcp.entries(folder, reader).values():
        tensors[entry.path] = torch.empty(entry.shape, dtype=torch_dtype(entry.dtype))
        for offsets, view in entry.chunks:
            box = tuple(slice(offset, offset + size) for offset, size in zip(offsets, view.shape, strict=True))
            tensors[entry.path][box] = _tensor(reader, view)
    return tensors


def _zero_weights(folder: Path, reader: FileReader, room: Path) -> "dict[str, torch.Tensor]":
    """The float32 weights of a ZeRO checkpoint, assembled by DeepSpeed from files rewritten into `room`."""
    import torch
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with tempfile.TemporaryDirectory(prefix=".zero-", dir=room) as place:
        step_folder = Path(place) / "step"
        step_folder.mkdir()
        for path in [*folder.glob(file_names.ZERO_MODELS), *folder.glob(file_names.ZERO_OPTIMIZERS)]:
            content = torch_zip.load(reader, path, deepspeed.ADMITTED)
            optimizer_state = content.get("optimizer_state_dict")
            model_state: dict[str, Any] = {key: content[key] for key in MODEL_STATE if key in content}
            if path.match(file_names.ZERO_OPTIMIZERS) and isinstance(optimizer_state, dict):
                model_state = {
                    "optimizer_state_dict": {
                        key: optimizer_state[key] for key in OPTIMIZER_STATE if key in optimizer_state
                    }
                }
            torch.save(_with_tensors(model_state, reader), step_folder / path.name)
        weights = get_fp32_state_dict_from_zero_checkpoint(place, tag=step_folder.name)
        return {name: tensor.clone() for name, tensor in weights.items()}
