"""LoRA and DoRA adapters merged into their base, rows at a time: W + scale * B A, and DoRA's magnitudes.

The formulas are those of PEFT's `merge_and_unload` (peft 0.21, `tuners/lora/layer.py` and `variants.py`), in float32.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from accel_fsdp.errors import UserError
from accel_fsdp.sources import LORA, PEFT_PREFIX
from accel_fsdp.stored import Reader, Source, Stored, part_of
from accel_fsdp.stream import torch_dtype, whole

UNKNOWN = ("use_qalora", "velora_config", "arrow_config", "layer_replication", "lora_bias", "trainable_token_indices")
"""Settings of LoRA whose merge is another one."""


@dataclass(frozen=True)
class Merged:
    """One weight with its adapter, rounded to `dtype` once.

    `turned`: the adapter's product is the transposed weight's, as in Conv1D.
    """

    dtype: str
    base: Source
    down: Stored
    up: Stored
    scale: float
    magnitude: Stored | None = None
    turned: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """As of the base."""
        return self.base.shape

    @property
    def unit(self) -> int:
        """A row; the whole weight where DoRA's norms run across rows."""
        return prod(self.shape) if self.turned and self.magnitude else math.lcm(self.shape[1], self.base.unit)

    def read(self, reader: Reader, start: int, stop: int, buffer: memoryview) -> None:
        """Fills `buffer` with merged rows."""
        import torch

        content = part_of(reader, self.base, start, stop)
        rows = torch.frombuffer(content, dtype=torch_dtype(self.base.dtype)).view(-1, self.shape[1])
        first, last = start // self.shape[1], stop // self.shape[1]
        down, up = whole(reader, self.down).float(), whole(reader, self.up).float()
        change = (down.T[first:last] @ up.T if self.turned else up[first:last] @ down) * self.scale
        made = rows.float() + change
        if self.magnitude is not None:
            magnitude = whole(reader, self.magnitude).float().view(-1)
            norm = torch.linalg.norm(made, dim=0 if self.turned else 1)
            made *= (magnitude / norm) if self.turned else (magnitude[first:last] / norm)[:, None]
        torch.frombuffer(buffer, dtype=torch_dtype(self.dtype)).view_as(made).copy_(made)


def merged(
    base: Mapping[str, Source], adapter: Mapping[str, Stored], settings: Mapping[str, Any], wanted: str | None = None
) -> dict[str, Source]:
    """The base with all of the adapter's changes; changed weights in float32 unless `wanted` is the base's dtype.

    Without `wanted` they have the base's dtype.

    Raises:
        UserError: the adapter is of another kind or of another base.
    """
    _check(settings)
    found = dict(base)
    for name, one in adapter.items():
        if not LORA.search(name):  # modules_to_save, trained whole, and embeddings that PEFT saves beside their adapter
            plain = name.removeprefix(PEFT_PREFIX).replace(".base_layer.", ".")
            found[_in(found, plain)] = one
    modules = dict.fromkeys(LORA.split(name)[0] for name in adapter if LORA.search(name))
    for module in modules:
        target = _in(found, f"{module.removeprefix(PEFT_PREFIX)}.weight")
        found[target] = _merge(found[target], module, adapter, settings, wanted)
    return found


def _merge(
    base: Source, module: str, adapter: Mapping[str, Stored], settings: Mapping[str, Any], wanted: str | None
) -> Merged:
    embedding = f"{module}.lora_embedding_A" in adapter
    names = ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A.weight", "lora_B.weight")
    lacking = [name for name in names if f"{module}.{name}" not in adapter]
    if lacking:
        raise _other(f"{module}.{lacking[0]} is missing")
    down, up = (adapter[f"{module}.{name}"] for name in names)
    rank = down.shape[0]
    turned = embedding or bool(settings.get("fan_in_fan_out"))
    shape = (down.shape[1], up.shape[0]) if turned else (up.shape[0], down.shape[1])
    if len(base.shape) != 2 or base.shape != shape:
        raise _other(f"{module} is {list(base.shape)} in the base and {list(shape)} in the adapter")
    plain = module.removeprefix(PEFT_PREFIX)
    alpha = _of(plain, settings.get("alpha_pattern") or {}, settings.get("lora_alpha", 8))
    scale = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
    dtype = base.dtype if wanted in (None, base.dtype) else "F32"
    return Merged(dtype, base, down, up, scale, adapter.get(f"{module}.lora_magnitude_vector"), turned)


def _of(module: str, patterns: Mapping[str, float], default: float) -> float:
    """A setting of one module: by the first pattern that its name ends in, as PEFT matches them."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def _in(base: Mapping[str, Source], name: str) -> str:
    if name not in base:
        raise _other(f"{name} is not in the base")
    return name


def _check(settings: Mapping[str, Any]) -> None:
    kind = settings.get("peft_type")
    asked = [key for key in UNKNOWN if settings.get(key)]
    if kind != "LORA" or asked or settings.get("bias", "none") != "none":
        what = asked[0] if asked else f"bias={settings.get('bias')}" if kind == "LORA" else str(kind)
        raise UserError(
            f"an adapter of kind {what} can't be merged here",
            why="only LoRA and DoRA are merged in bounded memory",
            fix="export the adapter without --merge-adapter and merge it with PEFT: merge_and_unload()",
        )


def _other(what: str) -> UserError:
    return UserError(
        f"the adapter doesn't fit its base: {what}",
        why="the merged weights would be wrong",
        fix="give the model that the adapter was trained on: --model ID_OR_FOLDER",
    )
