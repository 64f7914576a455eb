"""The tensors of an export and their names: tied weights once, in the layout of files, with adapters merged."""

from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from math import prod

from accel_fsdp.checkpoints import (
    FLOATS,
    LORA,
    TIED,
    TOKENS,
    FileReader,
    Source,
    Stored,
    Weights,
    open_checkpoint,
    part_of,
    tensor_names,
)
from accel_fsdp.errors import NotInstalled, UserError
from accel_fsdp.exporter import hf_layout, merge_lora
from accel_fsdp.exporter.companion_files import CompanionFiles
from accel_fsdp.exporter.safetensors_writer import BLOCK_ELEMENTS, Output, cast_to
from accel_fsdp.exporter.transformers_probe import FIX_CONFIG, Description
from accel_fsdp.models import config_json, remote_code
from accel_fsdp.units import first_few

SHOWN = 3
PARAMETERS = (".weight", ".bias", TOKENS)
"""Endings of the names of an adapter's parameters, besides those of LoRA."""
FILED_AS_NAMED = frozenset({"llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3"})
"""Model types for which an export works without transformers: their files hold the tensors under the names of the
model's code, all in one dtype, tied only if the config says so."""
BUFFERS = ("inv_freq", "position_ids", "attn.bias", "attn.masked_bias", "masked_bias")
"""Buffers that models used to save and now compute."""


@dataclass(frozen=True)
class Planner:
    """Plans one export. `dtype` is that of the files, None for the stored dtype; `merge`: an adapter into its base."""

    weights: Weights
    companions: CompanionFiles
    reader: FileReader
    dtype: str | None
    merge: bool = False

    def described(self, description: "Future[Description]", by_name: bool) -> tuple[Description | None, str]:
        """Waits for transformers' description of the model's files; None if the config alone is enough, and why.

        That is the case under `by_name`, where only the model's own code knows its tensors, or without transformers for
        the model types in `FILED_AS_NAMED`.
        """
        try:
            return description.result(), ""
        except remote_code.NeedsCode:
            if not by_name:
                raise
            return None, "transformers has no such model"
        except NotInstalled:
            kind = self.companions.config.get("model_type")
            if not by_name or self.merge or kind not in FILED_AS_NAMED:
                raise
            return None, "transformers isn't installed"

    def outputs(self, description: Description | None) -> list[Output]:
        """The tensors to write. Without a description, names and ties are inferred from the config."""
        _check_matrices(self.weights.adapter)
        if self.weights.adapter and not self.merge:
            return self._named(self.weights.adapter, {})
        is_whole = self.weights.filed or (self.merge and not self.weights.tensors)
        sources = self._tensors(description)
        if description is not None:
            sources = tensor_names.unprefixed(sources, description.files if is_whole else description.memory)
        tensors = self._without_copies(sources, self._ties(sources, description))
        if description is None:
            return self._named(tensors, {})
        expected = description.files if is_whole else description.memory
        compared = _checked_tensors(tensors, expected, description.floating, self.companions)
        if is_whole or not description.converts:
            return self._named(compared, description.wider)
        return self._named(hf_layout.converted(compared, description, self.companions.folder), description.wider)

    def _tensors(self, description: Description | None) -> Mapping[str, Source]:
        if not self.merge:
            return self.weights.tensors
        adapter, settings = self.weights.adapter, self.companions.settings
        turned = description.turned if description else None
        method = config_json.quant_method(self.companions.config.get("quantization_config"))
        if method and not self.weights.tensors:
            raise _quantised(self.companions, method)
        base: Mapping[str, Source] = self.weights.tensors or open_checkpoint.of_folder(self.companions.folder)
        ties = self._ties(base, description)
        if self.weights.tensors:
            return merge_lora.merged(base, adapter, settings, self.dtype, turned=turned)
        filed_as = description.filed_as if description else None
        adapter = merge_lora.tied_once(adapter, settings, ties)
        return merge_lora.merged(base, adapter, settings, self.dtype, filed_as=filed_as, turned=turned)

    def _named(self, tensors: Mapping[str, Source], wider: Mapping[str, str]) -> list[Output]:
        return [Output(name, cast_to(t.dtype, wider.get(name, self.dtype)), t) for name, t in tensors.items()]

    def _ties(self, tensors: Mapping[str, Source], description: Description | None) -> tuple[tuple[str, ...], ...]:
        if description is not None:
            return description.ties
        tied = self.companions.config.get("tie_word_embeddings")
        return tuple((embedding, head) for head, embedding in TIED if tied and embedding in tensors)

    def _without_copies(self, tensors: Mapping[str, Source], ties: tuple[tuple[str, ...], ...]) -> dict[str, Source]:
        first_of_storage = dict(tensors)
        for group in ties:
            present = [name for name in group if name in first_of_storage]
            for copy in present[1:]:
                if not equal(self.reader, first_of_storage[present[0]], first_of_storage[copy]):
                    raise UserError(
                        f"{present[0]} and {copy} differ, and the config ties them",
                        why="from_pretrained would load one of them for both",
                        fix="if they were trained apart: tie_word_embeddings: false in the config of --model FOLDER",
                    )
                del first_of_storage[copy]
            if present and present[0] != group[0]:
                first_of_storage[group[0]] = first_of_storage.pop(present[0])
        return first_of_storage


def equal(reader: FileReader, first: Source, second: Source) -> bool:
    """Whether two tensors hold the same elements; by checksums where that is enough."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    if isinstance(first, Stored) and isinstance(second, Stored) and first.content == second.content:
        return True
    count, unit = prod(first.shape), max(first.unit, second.unit)
    step = max(1, BLOCK_ELEMENTS // unit) * unit
    return all(
        part_of(reader, first, at, min(at + step, count)) == part_of(reader, second, at, min(at + step, count))
        for at in range(0, count, step)
    )


def _check_matrices(adapter: Mapping[str, Stored]) -> None:
    """Checks that an adapter holds floating-point numbers, however its base is stored."""
    trained = {name: tensor for name, tensor in adapter.items() if name.endswith(PARAMETERS) or LORA.search(name)}
    integer_name = next((name for name, tensor in trained.items() if tensor.dtype not in FLOATS), None)
    if integer_name is not None:
        raise UserError(
            f"{integer_name} of the adapter has no floating-point dtype but {trained[integer_name].dtype}",
            why="training doesn't produce such weights: the file's header or index is damaged",
            fix="copy the adapter again from where it was written",
        )


def _checked_tensors(
    tensors: dict[str, Source],
    expected: Mapping[str, tuple[int, ...]],
    floating: Collection[str],
    companions: CompanionFiles,
) -> dict[str, Source]:
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
    tensors: Mapping[str, Source], expected: Mapping[str, tuple[int, ...]], floating: Collection[str]
) -> Iterator[str]:
    for name, shape in expected.items():
        if name not in tensors:
            yield f"{name} is missing"
        elif tensors[name].shape != shape:
            yield f"{name} is {list(tensors[name].shape)}, the config says {list(shape)}"
        elif name in floating and tensors[name].dtype not in FLOATS:
            yield f"{name} has no floating-point dtype but {tensors[name].dtype}"
