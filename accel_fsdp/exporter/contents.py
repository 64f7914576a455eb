"""The tensors of an export and their names: tied weights once, in the layout of files, with adapters merged."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from accel_fsdp.checkpoints import LORA, TIED, TOKENS, Stored, Weights, safetensors_files, same_bytes, short_name
from accel_fsdp.errors import UserError
from accel_fsdp.exporter import hf_layout, merge_lora
from accel_fsdp.exporter.companion_files import CompanionFiles
from accel_fsdp.exporter.transformers_probe import FIX_CONFIG, Description
from accel_fsdp.exporter.writer import Output
from accel_fsdp.models import config_json
from accel_fsdp.units import first_few

SHOWN = 3
PARAMETERS = (".weight", ".bias", TOKENS)
"""Endings of the names of an adapter's parameters, besides those of LoRA."""
BUFFERS = ("inv_freq", "position_ids", "attn.bias", "attn.masked_bias", "masked_bias")
"""Buffers that models used to save and now compute."""
EXPONENTS = frozenset({torch.float8_e8m0fnu})
"""Dtypes whose numbers scale others, and aren't cast."""


@dataclass(frozen=True)
class Planner:
    """Plans one export. `dtype` is that of the files, None for the stored dtype; `merge`: an adapter into its base."""

    weights: Weights
    companions: CompanionFiles
    dtype: torch.dtype | None
    merge: bool = False

    def outputs(self, description: Description | None) -> list[Output]:
        """The tensors to write. Without a description, names and ties are inferred from the config."""
        _check_matrices(self.weights.adapter)
        if self.weights.adapter and not self.merge:
            return self._named(self.weights.adapter, {})
        tensors, is_filed = self._tensors(description)
        tensors = self._without_copies(tensors, self._ties(tensors, description))
        if description is None:
            return self._named(tensors, {})
        expected = description.files if is_filed else description.memory
        compared = _checked_tensors(tensors, expected, description.floating, self.companions)
        if is_filed or not description.converts:
            return self._named(compared, description.wider)
        return self._named(hf_layout.converted(compared, description, self.companions.folder), description.wider)

    def _tensors(self, description: Description | None) -> tuple[Mapping[str, Stored], bool]:
        """The model's tensors, and whether their names are those of files."""
        if not self.merge:
            return self.weights.tensors, self.weights.filed
        adapter, settings, is_whole = self.weights.adapter, self.companions.settings, bool(self.weights.tensors)
        method = config_json.quant_method(self.companions.config.get("quantization_config"))
        if method and not is_whole:
            raise _quantised(self.companions, method)
        if not is_whole:
            adapter = merge_lora.tied_once(adapter, settings, self._ties(self._base, description))
        if not merge_lora.is_plain(adapter, settings):
            return merge_lora.by_peft(self.weights, self.companions), False
        filed_as = description.filed_as if description and not is_whole else None
        turned = description.turned if description else None
        return merge_lora.merged(self._base, adapter, settings, filed_as, turned), not is_whole

    @cached_property
    def _base(self) -> Mapping[str, Stored]:
        """The tensors into which an adapter is merged."""
        return self.weights.tensors or safetensors_files.of_folder(self.companions.folder)

    @cached_property
    def _own_dtype(self) -> torch.dtype | None:
        """The dtype of the files, that of the base where a merge has none; None: as stored."""
        if self.dtype is not None or not self.merge:
            return self.dtype
        return next((tensor.dtype for tensor in self._base.values() if tensor.dtype.is_floating_point), None)

    def _named(self, tensors: Mapping[str, Stored], wider: Mapping[str, torch.dtype]) -> list[Output]:
        return [Output(name, self._dtype(name, tensor, wider), tensor) for name, tensor in tensors.items()]

    def _dtype(self, name: str, tensor: Stored, wider: Mapping[str, torch.dtype]) -> torch.dtype:
        asked = wider.get(name, self._own_dtype)
        is_cast = asked is not None and tensor.dtype.is_floating_point and tensor.dtype not in EXPONENTS
        return asked if is_cast and asked is not None else tensor.dtype

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


def _check_matrices(adapter: Mapping[str, Stored]) -> None:
    """Checks that an adapter holds floating-point numbers, however its base is stored."""
    for name, tensor in adapter.items():
        if (name.endswith(PARAMETERS) or LORA.search(name)) and not tensor.dtype.is_floating_point:
            raise UserError(
                f"{name} of the adapter has no floating-point dtype but {short_name(tensor.dtype)}",
                why="training doesn't produce such weights: the file's header or index is damaged",
                fix="copy the adapter again from where it was written",
            )


def _checked_tensors(
    tensors: dict[str, Stored],
    expected: Mapping[str, tuple[int, ...]],
    floating: Collection[str],
    companions: CompanionFiles,
) -> dict[str, Stored]:
    """The tensors of the model, without buffers that it computes itself; raises if one is missing."""
    extra = [name for name in tensors if name not in expected and not name.endswith(BUFFERS)]
    problems = list(_problems(tensors, expected, floating)) + [f"{name} is unexpected" for name in extra]
    if problems and (method := config_json.quant_method(companions.config.get("quantization_config"))):
        raise _quantised(companions, method)
    if problems:
        raise UserError(
            f"the checkpoint isn't of the model in {companions.folder}: {first_few(problems, SHOWN, '; ')}",
            why="from_pretrained would fail or leave weights random",
            fix=FIX_CONFIG,
        )
    return {name: tensors[name] for name in expected}


def _quantised(companions: CompanionFiles, method: str) -> UserError:
    return UserError(
        f"{companions.folder} is quantised ({method}), which the export doesn't support",
        why="its files hold packed numbers and their scales, in a layout that only the library that quantised it knows",
        fix="give the model before it was quantised: --model ID_OR_FOLDER; or export with that library",
    )


def _problems(
    tensors: Mapping[str, Stored], expected: Mapping[str, tuple[int, ...]], floating: Collection[str]
) -> Iterator[str]:
    for name, shape in expected.items():
        if name not in tensors:
            yield f"{name} is missing"
        elif tensors[name].shape != shape:
            yield f"{name} is {list(tensors[name].shape)}, the config says {list(shape)}"
        elif name in floating and not tensors[name].dtype.is_floating_point:
            yield f"{name} has no floating-point dtype but {short_name(tensors[name].dtype)}"
