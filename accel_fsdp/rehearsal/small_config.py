"""A model's config with fewer and narrower layers: rules for keys by what their names say, none for single models.

A width is replaced by its value: widths that are equal in the real model, such as those on both sides of a projector,
are equal in the small one. What relates sizes to each other stays: heads to groups of heads, experts used to experts,
parts of a head to the whole, layers of each kind.
"""

import copy
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from accel_fsdp.rehearsal import layer_kinds

if TYPE_CHECKING:
    from torch import nn

HEAD_WIDTH, HEADS, GROUPS, WIDTH = 16, 4, 2, 64
MOST_HEADS_OF_ONE_GROUP = 8
"""Of models with one key for all heads: Falcon has 71, which would make it wide."""
EXPERTS, EXPERTS_USED, EXPERT_GROUPS = 8, 2, 2
WINDOW = 16
"""Tokens that a sliding window sees, so that it matters in rows of 64."""
ROUNDED_TO = 16
VOCABULARY_ROUNDED_TO = 64

HIDDEN = ("hidden_size", "n_embd", "d_model", "dim", "embed_dim")
HEAD_COUNTS = re.compile(r"^((en|de)coder_)?((num_)?attention_heads|num_heads|n_heads?)$")
GROUP_COUNTS = re.compile(
    r"^((en|de)coder_)?(num_key_value_heads|num_kv_heads|n_kv_heads|kv_n_heads|multi_query_group_num)$"
)
INDEX_HEADS = ("index_n_heads",)
HEAD_WIDTHS = re.compile(r"^(?!mamba_)(.*_)?(head_dim|d_kv|kv_channels|head_size|d_head|dim_head)$|^rotary_dim$")
WIDTHS = re.compile(
    r"(^|_)(hidden_size|intermediate_size|embedding_size|hidden_dim|ffn_dim|mlp_dim|inner_dim|intermediate_dim|proj_dim"
    r"|projection_dim|embed_dim|in_dim|out_dim|lora_rank|lru_width|rank|hidden_size_per_layer_input|d_ff|d_inner|d_model|n_inner"
    r"|n_embd|ffn_hidden_size|mlp_hidden_size)$|^dim$"
)
DEPTHS = re.compile(
    r"^((en|de)coder_)?(num_hidden_layers|num_layers|n_layers?|layers|depth)$|^num_(en|de)coder_layers$"
)
LAYER_LISTS = ("layer_types", "layers_block_type")
"""What a config has that doesn't say the number of its layers."""
FROM_THE_START = ("first_k_dense_replace", "num_dense_layers", "max_window_layers", "moe_layer_start_index")
FROM_THE_END = ("num_kv_shared_layers",)
NUMBERS_OF_LAYERS = re.compile(r"(ind(ex|ic|x)|idx|layers|layer_ids)")
EXPERT_COUNTS = re.compile(r"^(num_experts|num_local_experts|n_routed_experts|moe_num_experts)$")
USED_COUNTS = re.compile(r"^(num_experts_per_tok|num_experts_per_token|top_k_experts|moe_topk|moe_top_k|moe_k)$")
WINDOWS = re.compile(r"^(sliding_window(_size)?|local_attention|attention_chunk_size|index_topk|attention_window)$")
VOCABULARIES = re.compile(r"^(?!type_|char_).*vocab_size(_|$)")
TOKENS = re.compile(r"token_(id|index)s?$|token_indexes$")
TOKEN_LISTS = ("suppress_tokens", "begin_suppress_tokens", "forced_decoder_ids", "bad_words_ids")
FEATURE_LAYERS = re.compile(r"^(vision_feature_layers?|vit_layers)$")
"""From which layers of the image encoder features are taken; negative ones count from the last."""
OF_LAYERS = "per_layer_config"
"""Maps numbers of layers to the keys that are others in them."""
ROPE = ("rope_parameters", "rope_scaling")
NOT_COMPARED = frozenset({"transformers_version", "_name_or_path", "architectures", "dtype"})
LEFT_OUT = ("quantization_config", "auto_map")
"""Random weights have nothing to be quantised by; the model's own code, which transformers does without, stays away."""
MAMBA = (("mamba_n_heads", "mamba_d_head"), ("mamba_num_heads", "mamba_head_dim"), ("num_heads", "head_dim"))


@dataclass(frozen=True)
class Change:
    """A key of the config that differs; `key` has a dot before each key of a part."""

    key: str
    before: object
    after: object

    def __str__(self) -> str:
        return f"{self.key} {_shown(self.before)} -> {_shown(self.after)}"


def _shown(value: object) -> str:
    text = str(value)
    return (
        text if len(text) <= 60 else f"{len(value)} entries" if isinstance(value, (list, dict)) else text[:57] + "..."
    )


@dataclass(frozen=True)
class Attempt:
    """What is made smaller besides the layers; the first attempt that makes a model that runs is taken."""

    words: str
    widths: bool = True
    parts: bool = True
    """Also the widths of parts besides the text's: an image or audio encoder."""
    vocabulary: bool = True
    heads: bool = True
    """Also the widths of heads, on which some code relies without a word in the config."""


ATTEMPTS = (
    Attempt("depth, widths and vocabulary"),
    Attempt("depth, widths but those of heads, and vocabulary", heads=False),
    Attempt("depth and widths", vocabulary=False),
    Attempt("depth, the text part's widths and vocabulary", parts=False),
    Attempt("depth and vocabulary", widths=False),
    Attempt("depth alone", widths=False, vocabulary=False),
)


@dataclass
class Part:
    """A config, or one inside of it, as a mapping that is changed in place."""

    values: dict[str, Any]
    names: dict[str, str]
    """Its own words for the usual keys, from transformers' `attribute_map`."""
    main: bool = False
    real: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.real = copy.deepcopy(self.values)

    def keys(self, wanted: re.Pattern[str]) -> list[str]:
        """The keys that are named so, in its own words too, and hold a whole number."""
        own = {mine for usual, mine in self.names.items() if wanted.search(usual)}
        return [key for key, value in self.real.items() if type(value) is int and (key in own or wanted.search(key))]

    @property
    def hidden(self) -> int:
        """The width of its layers, 0 if none is named."""
        keys = (self.names.get("hidden_size", "hidden_size"), *HIDDEN)
        found = (self.real.get(key) for key in keys)
        return next((value for value in found if type(value) is int and value > 0), 0)

    @property
    def heads(self) -> int:
        """Heads of an attention, 0 if it names none."""
        return next((self.real[key] for key in self.keys(HEAD_COUNTS) if self.real[key] > 0), 0)

    @property
    def groups(self) -> int:
        """Heads that have keys and values of their own."""
        if self.real.get("multi_query") is True and not self.real.get("new_decoder_architecture"):
            return 1
        named = (self.real[key] for key in self.keys(GROUP_COUNTS) if self.real[key] > 0)
        return next((number for number in named if self.heads % number == 0), self.heads)

    @property
    def head_width(self) -> int:
        """The width of a head: as named, else of that part of the layers' width."""
        named = [
            self.real[key] for key in ("head_dim", "v_head_dim", "d_kv", "kv_channels", "d_head") if self._has(key)
        ]
        return max(named) if named else self.hidden // self.heads if self.heads else 0

    @property
    def fills_width(self) -> bool:
        """Whether all heads together are as wide as its layers."""
        return self.heads * self.head_width == self.hidden

    @property
    def experts(self) -> int:
        """Experts of a layer, the most where layers differ; 0 if it names none."""
        named = [value for key, value in self.real.items() if EXPERT_COUNTS.search(key)]
        each = [one for value in named for one in (value if isinstance(value, list) else [value])]
        return max((one for one in each if type(one) is int), default=0)

    def _has(self, key: str) -> bool:
        return type(self.real.get(key)) is int and self.real[key] > 0


def parts_of(config: Any) -> list[Part]:
    """The config and all configs in it, as parts of one mapping, the whole first."""
    values = config.to_dict()
    for key in LEFT_OUT:
        values.pop(key, None)
    main = config.get_text_config()
    return list(_parts(config, values, main))


def _parts(config: Any, values: dict[str, Any], main: Any) -> Iterator[Part]:
    yield Part(values, dict(getattr(config, "attribute_map", None) or {}), main=config is main)
    for key, value in values.items():
        if isinstance(value, dict) and hasattr(inner := getattr(config, key, None), "to_dict"):
            yield from _parts(inner, value, main)


@dataclass(frozen=True)
class Words:
    """The tokens of the small model: how many, and the new number of each that the config names, if they change."""

    count: int
    ids: Mapping[int, int] = field(default_factory=dict)


def smaller(
    config: Any, model: "nn.Module", layers: int, attempt: Attempt, words: Words, in_a_row: bool = False
) -> Any:
    """The config with at least `layers` layers, so many that each kind is among them.

    `model` is the real one on the meta device. `in_a_row` takes the first layers up to the last kind's first one.

    Raises:
        ValueError, and whatever transformers raises: no model has the sizes that came out.
    """
    parts = parts_of(config)
    for part in parts:
        _fewer_layers(part, model, layers, in_a_row)
        _small_windows(part)
        if attempt.vocabulary:
            _small_vocabulary(part, words)
        _renumber(part, words)
    _feature_layers(parts)
    if attempt.widths:
        _narrow(parts, attempt)
    return type(config).from_dict(parts[0].values)


def changes(before: Mapping[str, Any], after: Mapping[str, Any], place: str = "") -> tuple[Change, ...]:
    """What differs between two configs, key by key."""
    found: list[Change] = []
    for key in dict.fromkeys([*before, *after]):
        one, other = before.get(key), after.get(key)
        if isinstance(one, dict) and isinstance(other, dict):
            found += changes(one, other, f"{place}{key}.")
        elif one != other and key not in NOT_COMPARED:
            found.append(Change(f"{place}{key}", one, other))
    return tuple(found)


def token_ids(config: Any) -> dict[int, str]:
    """The tokens that a config names by their numbers, each with the first key that does."""
    found: dict[int, str] = {}
    for part in parts_of(config):
        for key, value in part.real.items():
            if TOKENS.search(key):
                for number in value if isinstance(value, list) else [value]:
                    if type(number) is int and number >= 0:
                        found.setdefault(number, key)
    return found


def renumbered(value: Any, ids: Mapping[int, int]) -> Any:
    """A token's number, or a list of them, after tokens got other numbers."""
    if isinstance(value, list):
        return [renumbered(one, ids) for one in value]
    return ids.get(value, value) if type(value) is int else value


# Layers


def _fewer_layers(part: Part, model: "nn.Module", layers: int, in_a_row: bool) -> None:
    for key in part.keys(DEPTHS) or [key for key in LAYER_LISTS if isinstance(part.real.get(key), list)]:
        depth = part.real[key] if key not in LAYER_LISTS else len(part.real[key])
        if depth > 1:
            taken = _taken(part, model, depth, layers, in_a_row)
            if key not in LAYER_LISTS:
                part.values[key] = len(taken)
            _per_layer(part, depth, taken)


def _taken(part: Part, model: "nn.Module", depth: int, layers: int, in_a_row: bool) -> list[int]:
    """The layers that are kept: one of each kind, and the first ones up to as many as are asked for."""
    found = layer_kinds.kinds(model, depth)
    wanted = set(layer_kinds.first_of_each(found))
    if found and (in_a_row or not _says_kinds(part, depth)):  # every which layer: that holds from the first on
        wanted = set(range(max(wanted) + 1))
    wanted |= {numbers[0] for _, numbers in _numbers_of_layers(part, depth)}
    for number in range(depth):
        if len(wanted) >= layers:
            break
        wanted.add(number)
    return sorted(wanted)


def _says_kinds(part: Part, depth: int) -> bool:
    """Whether layers can be left out in between: their kinds are listed, or a number of layers has another kind."""
    lists = any(isinstance(value, list) and len(value) == depth for value in part.real.values())
    counts = any(type(part.real.get(key)) is int for key in (*FROM_THE_START, *FROM_THE_END))
    return lists or counts


def _numbers_of_layers(part: Part, depth: int) -> Iterator[tuple[str, list[int]]]:
    """The keys that list layers by number."""
    for key, value in part.real.items():
        numbers = isinstance(value, list) and value and all(type(one) is int and 0 <= one < depth for one in value)
        if (
            numbers
            and NUMBERS_OF_LAYERS.search(key)
            and not TOKENS.search(key)
            and len(set(value)) == len(value) < depth
        ):
            yield key, value


def _per_layer(part: Part, depth: int, taken: Sequence[int]) -> None:
    """Cuts whatever says something of each layer, or of some by their numbers, to the layers that are kept."""
    for key, value in part.real.items():
        if isinstance(value, list) and len(value) == depth and not TOKENS.search(key):
            part.values[key] = [value[number] for number in taken]
        elif type(value) is int and key in FROM_THE_START:
            part.values[key] = sum(number < value for number in taken)
        elif type(value) is int and key in FROM_THE_END:
            part.values[key] = sum(number >= depth - value for number in taken)
    for key, numbers in _numbers_of_layers(part, depth):
        part.values[key] = [taken.index(number) for number in numbers if number in taken]
    if isinstance(single := part.real.get(OF_LAYERS), dict) and all(int(number) < depth for number in single):
        found = {int(number): copy.deepcopy(keys) for number, keys in single.items()}
        part.values[OF_LAYERS] = {str(place): found[number] for place, number in enumerate(taken) if number in found}


def _feature_layers(parts: Sequence[Part]) -> None:
    """Takes features from layers that are still there."""
    depths = [part.values[key] for part in parts if not part.main for key in part.keys(DEPTHS)]
    last = min(depths, default=0)
    for part in parts if last else []:
        for key, value in part.real.items():
            if FEATURE_LAYERS.search(key) and value is not None:
                found = [max(-last, min(one, last - 1)) for one in (value if isinstance(value, list) else [value])]
                part.values[key] = found if isinstance(value, list) else found[0]


def _small_windows(part: Part) -> None:
    for key in part.keys(WINDOWS):
        part.values[key] = min(part.real[key], WINDOW)


# Words


def _small_vocabulary(part: Part, words: Words) -> None:
    for key in part.keys(VOCABULARIES):
        part.values[key] = min(part.real[key], words.count)


def _renumber(part: Part, words: Words) -> None:
    if not words.ids:
        return
    for key, value in part.real.items():
        if TOKENS.search(key):
            part.values[key] = renumbered(value, words.ids)
        elif key in TOKEN_LISTS:
            part.values[key] = None


# Widths


def _narrow(parts: Sequence[Part], attempt: Attempt) -> None:
    main = next((part for part in parts if part.main), parts[0])
    heads = _small_heads(main)
    head = (min(HEAD_WIDTH, main.head_width) if attempt.heads else main.head_width) or HEAD_WIDTH
    width = heads * head if heads and main.fills_width else WIDTH
    if main.hidden <= width:
        return  # it is small already
    known = {part.hidden: width for part in parts if part.hidden and (attempt.parts or part.main)}
    for part in parts:
        if part.main or attempt.parts or part is parts[0]:
            _narrow_part(part, width, head, known)
        if not part.heads:  # its heads are named in the config around it
            for key in part.keys(GROUP_COUNTS) if main.heads else []:
                part.values[key] = max(1, part.real[key] * heads // main.heads)


def _small_heads(part: Part) -> int:
    if not part.heads:
        return 0
    ratio = part.heads // part.groups
    if part.groups == 1:
        return min(ratio, MOST_HEADS_OF_ONE_GROUP)
    return min(HEADS, part.heads) if ratio == 1 else GROUPS * ratio


def _narrow_part(part: Part, width: int, head: int, known: dict[int, int]) -> None:
    _few_experts(part)
    mamba = _small_mamba(part, width)
    if part.heads and not (mamba and "num_heads" in part.real):
        _few_heads(part, width, head)
    hidden = part.hidden or max(known)
    single = part.values.get(OF_LAYERS) or {}
    for keys in (part.values, *single.values()):
        real = part.real if keys is part.values else dict(keys)
        for key, value in real.items():
            if key in mamba or not WIDTHS.search(key) or HEAD_WIDTHS.search(key):
                continue
            if type(value) is int:
                keys[key] = _scaled(value, width / hidden, known)
            elif isinstance(value, list) and all(type(one) is int for one in value):
                keys[key] = [_scaled(one, width / hidden, known) for one in keys[key]]


def _scaled(value: int, factor: float, known: dict[int, int]) -> int:
    """The same for equal widths, wherever they stand."""
    if value not in known:
        known[value] = min(value, max(ROUNDED_TO, round(value * factor / ROUNDED_TO) * ROUNDED_TO))
    return known[value]


def _few_heads(part: Part, width: int, head: int) -> None:
    named = any(HEAD_WIDTHS.search(key) for key in part.real if type(part.real[key]) is int)
    ratio = part.heads // part.groups
    heads = _small_heads(part)
    if (ratio == 1 and part.fills_width) or (not named and width % (2 * heads)):
        heads = max(1, width // head)
    for key in part.keys(HEAD_COUNTS):
        part.values[key] = heads
    for key in part.keys(GROUP_COUNTS):
        part.values[key] = max(1, heads // max(1, part.heads // part.real[key])) if part.real[key] > 1 else 1
    for key in INDEX_HEADS:
        if type(part.real.get(key)) is int:
            part.values[key] = min(part.real[key], HEADS)
    small = width // heads if not named or part.fills_width else min(head, part.head_width)
    _narrow_heads(part, small)
    for keys in (part.values.get(OF_LAYERS) or {}).values():
        for key, value in keys.items():
            if type(value) is int and (HEAD_COUNTS.search(key) or GROUP_COUNTS.search(key)):
                keys[key] = max(1, value * heads // part.heads)
            elif type(value) is int and HEAD_WIDTHS.search(key):
                keys[key] = max(2, 2 * round(value * small / part.head_width / 2))


def _narrow_heads(part: Part, small: int) -> None:
    """All widths inside a head by the same factor, so that sums of them stay sums; even, as rotation takes pairs."""
    factor = small / part.head_width if part.head_width else 1.0
    for key, value in part.real.items():
        if type(value) is int and value > 1 and HEAD_WIDTHS.search(key):
            part.values[key] = max(2, 2 * round(value * factor / 2))
    if "qk_head_dim" in part.real and "qk_nope_head_dim" in part.real:
        part.values["qk_head_dim"] = part.values["qk_nope_head_dim"] + part.values["qk_rope_head_dim"]
    if "query_pre_attn_scalar" in part.real:
        part.values["query_pre_attn_scalar"] = small
    for key in ("linear_num_key_heads", "linear_num_value_heads"):
        keys = part.real.get("linear_num_key_heads") or 1
        if type(part.real.get(key)) is int:
            part.values[key] = max(1, part.real[key] * min(GROUPS, keys) // keys)
    for key in ROPE:
        if isinstance(part.values.get(key), dict):
            _small_rope(part.values[key], factor)


def _small_rope(rope: dict[str, Any], factor: float) -> None:
    """Cuts lists with a factor for each pair of dimensions, and the shares of a head in several rotations."""
    for key, value in rope.items():
        if isinstance(value, dict):
            _small_rope(value, factor)
        elif isinstance(value, list) and value and key.endswith("_factor"):
            count = max(1, round(len(value) * factor))
            rope[key] = [value[number * len(value) // count] for number in range(count)]
        elif isinstance(value, list) and value and key.endswith("_section"):
            rope[key] = _shares(value, max(len(value), round(sum(value) * factor)))


def _shares(parts: Sequence[int], total: int) -> list[int]:
    """`total` in whole numbers as `parts` share theirs, each at least 1."""
    exact = [part * total / sum(parts) for part in parts]
    found = [max(1, math.floor(one)) for one in exact]
    for number in sorted(range(len(parts)), key=lambda number: found[number] - exact[number])[: total - sum(found)]:
        found[number] += 1
    while sum(found) > total:
        found[found.index(max(found))] -= 1
    return found


def _few_experts(part: Part) -> None:
    """Few experts, of which a token uses no more than there are, and groups of at least two."""
    there = part.experts
    if there < 2:
        return
    few = min(there, EXPERTS)
    for key, value in part.real.items():
        if EXPERT_COUNTS.search(key) or USED_COUNTS.search(key):
            most = few if EXPERT_COUNTS.search(key) else EXPERTS_USED
            part.values[key] = (
                [min(one, most) for one in part.values[key]]
                if isinstance(value, list)
                else (min(value, most) if type(value) is int else value)
            )
    for key in ("n_group", "num_expert_group"):
        groups = part.real.get(key)
        if type(groups) is int and groups > 1:
            part.values[key] = min(groups, EXPERT_GROUPS)
            part.values["topk_group"] = max(1, (part.real.get("topk_group") or 1) * part.values[key] // groups)


def _small_mamba(part: Part, width: int) -> list[str]:
    """Heads and states of a state space layer, which together are `expand` times as wide as the layer."""
    expand = part.real.get("mamba_expand", part.real.get("expand"))
    if not isinstance(expand, (int, float)):
        return []
    for count, size in MAMBA:
        if type(part.real.get(count)) is int and type(part.real.get(size)) is int:
            part.values[size] = min(HEAD_WIDTH, part.real[size])
            part.values[count] = max(1, int(expand * width) // part.values[size])
            break
    else:
        count = size = ""
    for key in ("mamba_n_groups", "n_groups"):
        if type(part.real.get(key)) is int:
            part.values[key] = math.gcd(part.real[key], part.values[count]) if count else 1
    for key in ("mamba_d_state", "state_size", "ssm_state_size"):
        if type(part.real.get(key)) is int:
            part.values[key] = min(part.real[key], HEAD_WIDTH)
    if type(part.real.get("mamba_d_ssm")) is int:
        part.values["mamba_d_ssm"] = int(expand * width)
    return [count, size]
