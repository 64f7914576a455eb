"""LoRA and DoRA adapters merged into their base, rows at a time: W + scale * B A, and DoRA's magnitudes.

The formulas are those of PEFT's `merge_and_unload` (peft 0.21, `tuners/lora/layer.py` and `variants.py`), in float32.
"""

import math
import re
import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from accel_fsdp.checkpoints import (
    FLOATS,
    LORA,
    TOKENS,
    FileReader,
    Source,
    Stored,
    check_patterns,
    file_names,
    part_of,
    pattern_of,
    plain,
    tensor_names,
)
from accel_fsdp.errors import UserError
from accel_fsdp.exporter.safetensors_writer import BLOCK_ELEMENTS, check_range, torch_dtype, whole

if TYPE_CHECKING:
    import torch

KNOWN = frozenset(
    {
        *("peft_type", "peft_version", "task_type", "base_model_name_or_path", "revision", "auto_mapping"),
        *("inference_mode", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora"),
        *("fan_in_fan_out", "lora_dropout", "init_lora_weights", "target_modules", "exclude_modules"),
        *("target_parameters", "modules_to_save", "layers_to_transform", "layers_pattern", "trainable_token_indices"),
        *("ensure_weight_tying", "runtime_config", "megatron_core", "qalora_group_size"),
        *("eva_config", "corda_config", "lora_ga_config", "loftq_config"),  # settings of initialisations: see HARMLESS
    }
)
"""The settings of LoRA that this merge supports, or that don't change it. Any other enabled setting is refused."""
HARMLESS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
"""Initialisations that leave the base as it was."""


@dataclass(frozen=True)
class Changed:
    """A weight of the `base`, as training changed it; it is read in whole rows."""

    name: str
    dtype: str
    base: Source

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    @property
    def unit(self) -> int:
        return math.lcm(self.shape[1], self.base.unit)


@dataclass(frozen=True)
class Merged(Changed):
    """One weight with its adapter, rounded to `dtype` once.

    `turned`: the adapter's product is the transposed weight's, as in Conv1D and embeddings.
    """

    down: Stored
    up: Stored
    scale: float
    magnitude: Stored | None = None
    turned: bool = False
    norms: "Norms" = field(default_factory=lambda: Norms(), compare=False)

    def read(self, reader: FileReader, start: int, stop: int, buffer: memoryview) -> None:
        import torch

        weight = self.sum(reader, start, stop)
        if self.magnitude is not None:
            magnitude = whole(reader, self.magnitude).float().view(-1)
            if self.turned:
                weight *= magnitude / self.norms.across_rows(self, reader)
            else:
                rows = slice(start // self.shape[1], stop // self.shape[1])
                weight *= (magnitude[rows] / torch.linalg.norm(weight, dim=1))[:, None]
        rounded = torch.frombuffer(buffer, dtype=torch_dtype(self.dtype)).view_as(weight)
        rounded.copy_(weight)
        check_range(self.name, self.dtype, weight, rounded)

    def sum(self, reader: FileReader, start: int, stop: int) -> "torch.Tensor":
        """The sum of base and adapter for these rows, in float32."""
        import torch

        content = part_of(reader, self.base, start, stop)
        rows = torch.frombuffer(content, dtype=torch_dtype(self.base.dtype)).view(-1, self.shape[1])
        first, last = start // self.shape[1], stop // self.shape[1]
        down, up = whole(reader, self.down).float(), whole(reader, self.up).float()
        change = (down.T[first:last] @ up.T if self.turned else up[first:last] @ down) * self.scale
        return rows.float() + change


@dataclass
class Norms:
    """The norms of a weight's columns over all of its rows: computed once, some rows at a time."""

    lock: Any = field(default_factory=threading.Lock)
    lengths: "torch.Tensor | None" = None

    def across_rows(self, weight: Merged, reader: FileReader) -> "torch.Tensor":
        import torch

        with self.lock:
            if self.lengths is None:
                squares = torch.zeros(weight.shape[1], dtype=torch.float64)
                count, step = prod(weight.shape), max(1, BLOCK_ELEMENTS // weight.unit) * weight.unit
                for start in range(0, count, step):
                    squares += weight.sum(reader, start, min(start + step, count)).double().square().sum(dim=0)
                self.lengths = squares.sqrt().float()
            return self.lengths


@dataclass(frozen=True)
class Replaced(Changed):
    """An embedding, some rows of which were trained: those of `tokens`, in this order in `rows`."""

    rows: Stored
    tokens: tuple[int, ...]

    def read(self, reader: FileReader, start: int, stop: int, buffer: memoryview) -> None:
        import torch

        content = part_of(reader, self.base, start, stop)
        rows = torch.frombuffer(buffer, dtype=torch_dtype(self.dtype)).view(-1, self.shape[1])
        rows.copy_(torch.frombuffer(content, dtype=torch_dtype(self.base.dtype)).view_as(rows))
        first, last = start // self.shape[1], stop // self.shape[1]
        trained = whole(reader, self.rows)
        for number, token in enumerate(self.tokens):
            if first <= token < last:
                rows[token - first] = trained[number]
                check_range(self.name, self.dtype, trained[number], rows[token - first])


@dataclass(frozen=True)
class Merger:
    """Merges one adapter into `tensors`, which it changes; changed weights have the dtype that `_dtype` returns.

    `turned`: the transposed weights, by the layer's kind, as in PEFT; None if it depends on the settings alone.
    """

    tensors: dict[str, Source]
    adapter: Mapping[str, Stored]
    settings: Mapping[str, Any]
    wanted_dtype: str | None
    filed_as: Mapping[str, str] | None = None
    turned: frozenset[str] | None = None

    def lora(self, module: str) -> None:
        """Replaces the weight of `module` by the merged one."""
        down, up = (self.adapter.get(f"{module}.{name}.weight") for name in ("lora_A", "lora_B"))
        is_embedding = f"{module}.lora_embedding_A" in self.adapter
        if is_embedding:
            down, up = (self.adapter.get(f"{module}.lora_embedding_{letter}") for letter in "AB")
        if down is None or up is None:
            raise _mismatch(f"one of the two matrices of {module} is missing")
        target = self._target(module)
        base, name = self.tensors[target], plain(f"{module}.").rstrip(".")
        if base.dtype not in FLOATS:
            raise _mismatch(f"{target} has no floating-point dtype but {base.dtype}")
        by_settings = bool(self.settings.get("fan_in_fan_out"))
        turned = is_embedding or (by_settings if self.turned is None else f"{name}.weight" in self.turned)
        shape = (down.shape[1], up.shape[0]) if turned else (up.shape[0], down.shape[1])
        if len(base.shape) != 2 or base.shape != shape:
            raise _mismatch(f"{module} is {list(base.shape)} in the base and {list(shape)} in the adapter")
        rank = _setting_of(name, self.settings.get("rank_pattern"), self.settings.get("r", 8))
        if down.shape[0] != rank or not rank:
            raise _mismatch(f"{module} has rank {down.shape[0]}, its settings say {rank}")
        alpha = _setting_of(name, self.settings.get("alpha_pattern"), self.settings.get("lora_alpha", 8))
        if not isinstance(alpha, int | float):
            raise _mismatch(f"lora_alpha of {module} is {alpha}")
        scale = alpha / (math.sqrt(rank) if self.settings.get("use_rslora") else rank)
        magnitude = self.adapter.get(f"{module}.lora_magnitude_vector")
        if (magnitude is not None) != bool(self.settings.get("use_dora")):
            raise _mismatch(f"{module} has {'no' if magnitude is None else 'a'} magnitude, its settings say otherwise")
        self.tensors[target] = Merged(target, self._dtype(base), base, down, up, scale, magnitude, turned)

    def tokens(self, name: str) -> None:
        """Puts separately trained rows (`trainable_token_indices`) into their embedding."""
        target = self._target(name.removesuffix(TOKENS))
        base, rows, listed = self.tensors[target], self.adapter[name], self.settings.get("trainable_token_indices")
        if isinstance(listed, dict):
            module = plain(f"{name.removesuffix(TOKENS)}.").rstrip(".")
            listed = next((indices for key, indices in listed.items() if f".{module}".endswith(f".{key}")), None)
        tokens = tuple(listed) if isinstance(listed, list) else ()
        is_valid = all(isinstance(token, int) and 0 <= token < base.shape[0] for token in tokens)
        if not is_valid or rows.shape != (len(tokens), *base.shape[1:]):
            raise _mismatch(f"{name} is {list(rows.shape)}, its settings list {len(tokens)} tokens of {base.shape[0]}")
        self.tensors[target] = Replaced(target, self._dtype(base), base, rows, tokens)

    def _target(self, module: str) -> str:
        return self.named(f"{plain(f'{module}.')}weight")

    def named(self, name: str) -> str:
        """The name of a model's tensor in the base, whose files may use other names."""
        filed_name = name if self.filed_as is None else self.filed_as.get(name, name)
        if filed_name not in self.tensors and self.settings.get("target_parameters"):
            raise _unmergeable("with target_parameters")
        if self.filed_as is not None and name not in self.filed_as and filed_name in self.tensors:
            raise _unmergeable(f"on {name}, which the model's files hold in another layout,")
        if filed_name not in self.tensors:
            raise _mismatch(f"{filed_name} is not in the base")
        return filed_name

    def _dtype(self, base: Source) -> str:
        """The dtype of the merge: float32 unless the base's is asked for, so that another dtype is rounded to once."""
        return base.dtype if self.wanted_dtype in (None, base.dtype) else "F32"


def merged(
    base: Mapping[str, Source],
    adapter: Mapping[str, Stored],
    settings: Mapping[str, Any],
    wanted_dtype: str | None = None,
    filed_as: Mapping[str, str] | None = None,
    turned: frozenset[str] | None = None,
) -> dict[str, Source]:
    """The base with all of the adapter's changes.

    Changed weights have the base's dtype, or float32 if `wanted_dtype` is another one. `filed_as`: the names of the
    model's tensors in the base's files. `turned`: as in `Merger`.
    """
    merger = Merger(dict(base), adapter, settings, wanted_dtype, filed_as, turned)
    for name, tensor in adapter.items():
        if not LORA.search(name) and TOKENS not in name:  # fully trained, or an embedding stored with its adapter
            merger.tensors[merger.named(plain(name))] = tensor
    modules = list(dict.fromkeys(LORA.split(name)[0] for name in adapter if LORA.search(name)))
    check_patterns(settings, map(tensor_names.module_of, modules))
    for module in modules:
        merger.lora(module)
    for name in adapter:
        if TOKENS in name:
            merger.tokens(name)
    return merger.tensors


def check_saved(adapter: Collection[str], needed: Iterable[str], possible: Collection[str]) -> None:
    """Refuses an adapter that lacks tensors that PEFT creates for its settings, or holds matrices of other modules."""
    if lacks := tensor_names.lacking(adapter, needed):
        raise _contradiction(f"lacks {lacks}, which {file_names.ADAPTER_CONFIG} asks for")
    if unchosen := next((name for name in adapter if LORA.search(name) and name not in possible), None):
        module = tensor_names.module_of(unchosen)
        raise _contradiction(f"holds LoRA matrices of {module}, and {file_names.ADAPTER_CONFIG} chooses other modules")


def tied_once(
    adapter: Mapping[str, Stored], settings: Mapping[str, Any], ties: Iterable[tuple[str, ...]]
) -> dict[str, Stored]:
    """The adapter without the copies of weights that its settings keep tied (`ensure_weight_tying`).

    Otherwise PEFT trains one of the tied weights separately from the others; rows of tokens alone are always tied.

    Raises:
        UserError: the merged weights would differ, and a tied model stores them only once.
    """
    changed = {name: f"{plain(LORA.split(f'{name}.')[0] + '.')}weight" for name in adapter if LORA.search(name)}
    changed |= {name: plain(name) for name in adapter if not LORA.search(name) and TOKENS not in name}
    copies: set[str] = set()
    for group in ties:
        changed_names = [name for name in group if name in changed.values()]
        if changed_names and not settings.get("ensure_weight_tying"):
            partner = next(name for name in group if name != changed_names[0])
            raise UserError(
                f"the adapter changes {changed_names[0]}, which the base ties to {partner}",
                why="PEFT trains them apart, and the export of a tied model would hold one weight for both",
                fix="untie the base: base = AutoModelForCausalLM.from_pretrained(BASE, tie_word_embeddings=False), "
                "base.get_output_embeddings().weight.data = base.get_input_embeddings().weight.data.clone(), "
                "base.save_pretrained(FOLDER), then --model FOLDER; or export the adapter without --merge-adapter",
            )
        copies.update(changed_names[1:])
    return {name: tensor for name, tensor in adapter.items() if changed.get(name) not in copies}


def _setting_of(module: str, patterns: Mapping[str, Any] | None, default: Any) -> Any:
    """A setting of one module: by the first pattern that its name ends in, as PEFT matches them."""
    by_pattern = patterns if isinstance(patterns, dict) else {}
    return next((value for key, value in by_pattern.items() if re.fullmatch(pattern_of(key), module)), default)


def check_settings(settings: Mapping[str, Any], trained_base: bool) -> None:
    """Refuses adapters that these formulas don't cover.

    `trained_base`: the base was saved with the adapter, after the adapter's initialisation changed it.
    """
    if settings.get("peft_type") != "LORA":
        raise _unmergeable(f"of kind {settings.get('peft_type')}")
    others = {key: value for key, value in settings.items() if key not in KNOWN and value}
    unknown = [key for key, value in others.items() if (key, value) != ("bias", "none")]
    if unknown:
        raise _unmergeable(f"with {unknown[0]}")
    start = settings.get("init_lora_weights", True)
    if start not in HARMLESS and not trained_base:
        raise UserError(
            f"the adapter began with init_lora_weights: {start}, which changes the base",
            why="its numbers are for the changed base, which is not in the checkpoint; in the model's own files they "
            "would be wrong",
            fix="in the training script: save_pretrained(FOLDER, path_initial_model_for_weight_conversion=START), "
            "and export that; START is the adapter as it was saved before the first step",
        )


def _unmergeable(what: str) -> UserError:
    return UserError(
        f"an adapter {what} can't be merged here",
        why="only plain LoRA and DoRA are merged in bounded memory; this one is computed in another way",
        fix="export the adapter without --merge-adapter; where PEFT can merge it: merge_and_unload()",
    )


def _contradiction(what: str) -> UserError:
    return UserError(
        f"the adapter's file {what}",
        why="the file is incomplete or of another adapter, and the merge would not be the model that was trained",
        fix=f"copy {file_names.ADAPTER_CONFIG} and {file_names.ADAPTER} again, from one save_pretrained",
    )


def _mismatch(what: str) -> UserError:
    return UserError(
        f"the adapter doesn't fit its base: {what}",
        why="the merged weights would be wrong",
        fix="give the model that the adapter was trained on: --model ID_OR_FOLDER",
    )
