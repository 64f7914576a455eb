"""Makes a model's config small, by rules on key names; no rule is for a single model."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from accel_fsdp.models.shrink import fewer_layers, narrower
from accel_fsdp.models.shrink.config_parts import (
    EXPERT_COUNTS,
    GROUP_COUNTS,
    HEAD_COUNTS,
    TOKENS,
    Part,
    as_list,
    parts_of,
)

if TYPE_CHECKING:
    from torch import nn

WINDOW = 16
"""Tokens that a sliding window sees, so that it matters in rows of 64."""
WINDOWS = re.compile(r"^(sliding_window(_size)?|local_attention|attention_chunk_size|index_topk|attention_window)$")
VOCABULARY_ROUNDED_TO = 64
VOCABULARIES = re.compile(r"^(?!type_|char_).*vocab_size(_|$)")
TOKEN_LISTS = {"suppress_tokens", "begin_suppress_tokens", "forced_decoder_ids", "bad_words_ids"}
NOT_COMPARED = frozenset({"transformers_version", "_name_or_path", "architectures", "dtype"})


@dataclass(frozen=True)
class Change:
    """A changed key of the config; `key` is a dotted path for nested configs."""

    key: str
    before: object
    after: object

    def __str__(self) -> str:
        return f"{self.key} {_value_text(self.before)} -> {_value_text(self.after)}"


def _value_text(value: object) -> str:
    text = str(value)
    return (
        text if len(text) <= 60 else f"{len(value)} entries" if isinstance(value, (list, dict)) else text[:57] + "..."
    )


ATTEMPTS = (
    NARROW := "depth, widths and vocabulary",
    "depth, widths but those of heads, and vocabulary",
    SHALLOW := "depth and vocabulary",
)
"""The sizes that are reduced; the first attempt whose model runs is taken. Some models' code relies on the widths of
heads, although the config doesn't show it."""


@dataclass(frozen=True)
class Words:
    """The tokens of the small model: their number, and the new ids of those that the config names, if they change."""

    count: int
    ids: Mapping[int, int] = field(default_factory=dict)


def smaller(config: Any, model: "nn.Module", attempt: str, words: Words, divisors: Mapping[str, int]) -> Any:
    """The config with layers of each kind, at least two.

    `model` is the real one on the meta device. `divisors` are those of `parallel_plans` on the mesh that trains the
    small model; empty without one.

    Raises:
        ValueError, and any error of transformers: the resulting sizes are invalid.
    """
    parts = parts_of(config)
    for part in parts:
        fewer_layers.take(part, model)
        _limit(part, WINDOWS, WINDOW)
        _limit(part, VOCABULARIES, words.count)
        part.values |= renumbered(part.real, words.ids)
    fewer_layers.keep_features(parts)
    if attempt != SHALLOW:
        narrower.narrow(parts, heads_too=attempt == NARROW)
    for part in parts if divisors else ():
        _raise_for_mesh(part, divisors)
    return type(config).from_dict(parts[0].values)


def changes(before: Mapping[str, Any], after: Mapping[str, Any], place: str = "") -> tuple[Change, ...]:
    changed: list[Change] = []
    for key in dict.fromkeys([*before, *after]):
        old, new = before.get(key), after.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            changed += changes(old, new, f"{place}{key}.")
        elif old != new and key not in NOT_COMPARED:
            changed.append(Change(f"{place}{key}", old, new))
    return tuple(changed)


def token_ids(config: Any) -> dict[int, str]:
    """The token ids in a config, each with the first key that names it."""
    keys: dict[int, str] = {}
    for part in parts_of(config):
        for key, value in part.real.items():
            for number in as_list(value) if TOKENS.search(key) else ():
                if type(number) is int and number >= 0:
                    keys.setdefault(number, key)
    return keys


def renumbered(values: Mapping[str, Any], ids: Mapping[int, int]) -> dict[str, Any]:
    """The settings that name tokens, with the new `ids`; empty if no token has a new one."""
    tokens = {key: _renumbered(value, ids) for key, value in values.items() if TOKENS.search(key)}
    return {**dict.fromkeys(TOKEN_LISTS & values.keys()), **tokens} if ids else {}


def _renumbered(value: Any, ids: Mapping[int, int]) -> Any:
    if isinstance(value, list):
        return [_renumbered(number, ids) for number in value]
    return ids.get(value, value) if type(value) is int else value


def _limit(part: Part, pattern: re.Pattern[str], most: int) -> None:
    part.values |= {key: min(part.real[key], most) for key in part.keys(pattern)}


def _raise_for_mesh(part: Part, divisors: Mapping[str, int]) -> None:
    """Raises counts to multiples of what divides them, as the real ones are on the real mesh, which may be another."""
    _raise(part, EXPERT_COUNTS, divisors["experts"])
    _raise(part, VOCABULARIES, divisors["rows"])
    if any(narrower.HEAD_WIDTHS.search(key) for key in part.real):  # otherwise heads share a width that stays
        groups = _raise(part, GROUP_COUNTS, divisors["heads"])
        _raise(part, HEAD_COUNTS, math.lcm(groups, divisors["heads"]))


def _raise(part: Part, pattern: re.Pattern[str], divisor: int) -> int:
    """Raises counts over 1 to multiples of `divisor`; returns the largest."""
    keys = [key for key in part.keys(pattern) if part.values[key] > 1]
    part.values |= {key: -(-part.values[key] // divisor) * divisor for key in keys}
    return max((part.values[key] for key in keys), default=1)
