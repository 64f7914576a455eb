"""The tensors of an export and their names: tied weights once, in the layout of files, with adapters merged."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch

from accel_fsdp.checkpoints import TIED, Stored, Weights, safetensors_files, same_bytes
from accel_fsdp.errors import UserError
from accel_fsdp.exporter import exported_folder, merge_lora
from accel_fsdp.exporter.companion_files import CompanionFiles
from accel_fsdp.exporter.transformers_probe import FIX_CONFIG, SHOWN, Description
from accel_fsdp.exporter.writer import Output
from accel_fsdp.models import config_json
from accel_fsdp.units import first_few

LAYER = re.compile(r"^.*?\.\d+\.")
BUFFERS = ("inv_freq", "position_ids", "attn.bias", "attn.masked_bias", "masked_bias")
"""Buffers that models used to save and now compute."""


@dataclass(frozen=True)
class Planner:
    """Plans one export. `dtype` is that of the files, None for the stored dtype."""

    weights: Weights
    companions: CompanionFiles
    dtype: torch.dtype | None

    def outputs(self, description: Description | None) -> list[Output]:
        """The tensors of a model to write. Without a description, names and ties are inferred from the config."""
        tensors = self._without_copies(self.weights.tensors, self._ties(self.weights.tensors, description))
        if description is None:
            return named(tensors, self.dtype)
        expected = description.files if self.weights.filed else description.memory
        problems = list(_problems(tensors, expected))
        if problems:
            self._refuse_quantised()
            raise UserError(
                f"the checkpoint isn't of the model in {self.companions.folder}: {first_few(problems, SHOWN, '; ')}",
                why="from_pretrained would fail or leave weights random",
                fix=FIX_CONFIG,
            )
        whole = {name: tensors[name] for name in tensors if name in expected}  # no buffers that the model computes
        if not self.weights.filed and description.converts:
            whole = _in_files_layout(whole, description)
        wide = {torch.float32, torch.float64} if self.dtype else set()
        wider = {name: tensor.dtype for name, tensor in description.saved.items() if tensor.dtype in wide}
        return named(whole, self.dtype, wider)

    def early_outputs(self) -> list[Output]:
        """The tensors that the checkpoint and its config suggest. `other_outputs` checks them by the description."""
        copies = {name for group in self._ties(self.weights.tensors, None) for name in group[1:]}
        return named({name: t for name, t in self.weights.tensors.items() if name not in copies}, self.dtype)

    def other_outputs(self, description: Description | None, early: list[Output]) -> list[Output] | None:
        """The tensors to write in place of the `early` ones; None if those are right. Raises as `outputs` does."""
        outputs = self.outputs(description)
        return None if outputs == early else outputs

    def merged(self, description: Description | None) -> "Planner":
        """The plan for the base with the adapter merged into it; in the dtype of the base if none is asked for."""
        adapter, is_whole = self.weights.adapter, bool(self.weights.tensors)
        merge_lora.check_settings(self.companions.settings, trained_base=is_whole)
        model = merge_lora.adapted(self.companions.settings, self.companions.folder)
        merge_lora.check_saved(adapter, model)
        if not is_whole:
            self._refuse_quantised()
        base = self.weights.tensors or safetensors_files.of_folder(self.companions.folder)
        if not is_whole:
            merge_lora.check_ties(adapter, self._ties(base, description))
        filed_as = description.filed_as if description and not is_whole else None
        weights = Weights(merge_lora.merged(base, adapter, model, filed_as), filed=not is_whole)
        own = next((tensor.dtype for tensor in base.values() if tensor.dtype.is_floating_point), None)
        return replace(self, weights=weights, dtype=self.dtype or own)

    def _refuse_quantised(self) -> None:
        if method := config_json.quant_method(self.companions.config.get("quantization_config")):
            raise UserError(
                f"{self.companions.folder} is quantised ({method}), which the export doesn't support",
                why="only the library that quantised it knows the layout of its packed numbers and their scales",
                fix="give the model before it was quantised: --model ID_OR_FOLDER; or export with that library",
            )

    def _ties(self, tensors: Mapping[str, Stored], description: Description | None) -> tuple[tuple[str, ...], ...]:
        if description is not None:
            return description.ties
        tied = self.companions.config.get("tie_word_embeddings")
        return tuple((embedding, head) for head, embedding in TIED if tied and embedding in tensors)

    def _without_copies(self, tensors: Mapping[str, Stored], ties: tuple[tuple[str, ...], ...]) -> dict[str, Stored]:
        first_of_storage = dict(tensors)
        for group in ties:
            present = [name for name in group if name in first_of_storage]
            for copy in present[1:]:
                if not same_bytes(first_of_storage[present[0]], first_of_storage[copy]):
                    raise UserError(
                        f"{present[0]} and {copy} differ, and the config ties them",
                        why="from_pretrained would load one of them for both",
                        fix="if they were trained apart: tie_word_embeddings: false in the config of --model FOLDER",
                    )
                del first_of_storage[copy]
            if present and present[0] != group[0]:
                first_of_storage[group[0]] = first_of_storage.pop(present[0])
        return first_of_storage


def named(
    tensors: Mapping[str, Stored], dtype: torch.dtype | None, wider: Mapping[str, torch.dtype] | None = None
) -> list[Output]:
    """The tensors as they are written: floating-point numbers in `dtype`, or in that of `wider`."""
    outputs = []
    for name, tensor in tensors.items():
        is_cast = tensor.dtype.is_floating_point and tensor.dtype != torch.float8_e8m0fnu  # exponents that scale others
        asked = (wider or {}).get(name, dtype) if is_cast else None
        outputs.append(Output(name, asked or tensor.dtype, tensor))
    return outputs


def _problems(tensors: Mapping[str, Stored], expected: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    for name, shape in expected.items():
        if name not in tensors:
            yield f"{name} is missing"
        elif tensors[name].shape != shape:
            yield f"{name} is {list(tensors[name].shape)}, the config says {list(shape)}"
    yield from (f"{name} is unexpected" for name in tensors if name not in expected and not name.endswith(BUFFERS))


def _in_files_layout(tensors: Mapping[str, Stored], description: Description) -> dict[str, Stored]:
    """All tensors in the layout of files, such as one tensor per expert; transformers converts one layer at a time."""
    layers: dict[str, dict[str, Stored]] = {}
    for name, stored in tensors.items():
        match = LAYER.match(name)
        layers.setdefault(match[0] if match else "", {})[name] = stored

    @lru_cache(maxsize=1)
    def loaded(layer: str) -> dict[str, torch.Tensor]:
        content = {name: stored.load() for name, stored in layers[layer].items()}
        return exported_folder.as_saved(description.model, content)

    def load(layer: str, name: str) -> torch.Tensor:
        return loaded(layer)[name]

    sources: dict[str, Stored] = {}
    for layer, group in layers.items():
        blank = {name: torch.empty(s.shape, dtype=s.dtype, device="meta") for name, s in group.items()}
        for name, tensor in exported_folder.as_saved(description.model, blank).items():
            converted = Stored(tuple(tensor.shape), tensor.dtype, partial(load, layer, name))
            sources[name] = group[name] if blank.get(name) is tensor else converted
    if {name: source.shape for name, source in sources.items()} != description.files:
        raise UserError(
            f"the layout of {type(description.model).__name__}'s files can't be made layer by layer",
            why="its conversion joins tensors of several layers",
            fix="export at the end of training with FULL_STATE_DICT, or load the checkpoint and save_pretrained it",
        )
    return sources
