"""A config with narrow layers: few heads, few experts, small widths.

Equal widths in the real model, such as those on both sides of a projector, stay equal in the small one. Relations
between sizes stay too: heads to groups of heads, experts used to experts, parts of a head to the whole.
"""

import re
from collections.abc import Sequence
from typing import Any

from accel_fsdp.models.shrink.config_parts import EXPERT_COUNTS, GROUP_COUNTS, HEAD_COUNTS, Part

HEAD_WIDTH, HEADS, GROUPS, WIDTH = 16, 4, 2, 64
MOST_HEADS_OF_ONE_GROUP = 8
"""The most heads of a small model with one key for all heads. Falcon has 71, which would make it wide."""
EXPERTS, EXPERTS_USED, EXPERT_GROUPS = 8, 2, 2
ROUNDED_TO = 16
HEAD_WIDTHS = re.compile(r"^(.*_)?(head_dim|d_kv|kv_channels|head_size|d_head|dim_head)$|^rotary_dim$")
WIDTHS = re.compile(
    r"(^|_)(hidden_size|intermediate_size|embedding_size|hidden_dim|ffn_dim|mlp_dim|inner_dim|intermediate_dim|proj_dim"
    r"|projection_dim|embed_dim|in_dim|out_dim|lora_rank|lru_width|rank|hidden_size_per_layer_input|d_ff|d_inner|d_model|n_inner"
    r"|n_embd|ffn_hidden_size|mlp_hidden_size)$|^dim$"
)
USED_COUNTS = re.compile(r"^(num_experts_per_tok|num_experts_per_token|top_k_experts|moe_topk|moe_top_k|moe_k)$")


def narrow(parts: Sequence[Part], heads_too: bool) -> None:
    """Narrows the layers; with `heads_too` each head as well."""
    main = next((part for part in parts if part.main), parts[0])
    heads = _small_heads(main)
    head = (min(HEAD_WIDTH, main.head_width) if heads_too else main.head_width) or HEAD_WIDTH
    width = heads * head if heads and main.fills_width else WIDTH
    if main.hidden <= width:
        return  # the part is small already
    new_widths = {part.hidden: width for part in parts if part.hidden}
    for part in parts:
        _narrow_part(part, width, head, new_widths)
        if main.heads and not part.heads:  # the config around it names its heads
            for key in part.keys(GROUP_COUNTS):
                part.values[key] = max(1, part.real[key] * heads // main.heads)


def _small_heads(part: Part) -> int:
    if not part.heads:
        return 0
    ratio = part.heads // part.groups
    if part.groups == 1:
        return min(ratio, MOST_HEADS_OF_ONE_GROUP)
    return min(HEADS, part.heads) if ratio == 1 else GROUPS * ratio


def _narrow_part(part: Part, width: int, head: int, new_widths: dict[int, int]) -> None:
    _reduce_experts(part)
    if part.heads:
        _reduce_heads(part, width, head)
    factor = width / (part.hidden or max(new_widths))
    for key, value in part.real.items():
        if not WIDTHS.search(key) or HEAD_WIDTHS.search(key):
            continue
        if type(value) is int:
            part.values[key] = _scaled(value, factor, new_widths)
        elif isinstance(value, list) and all(type(size) is int for size in value):
            part.values[key] = [_scaled(size, factor, new_widths) for size in part.values[key]]


def _scaled(value: int, factor: float, new_widths: dict[int, int]) -> int:
    """Scales a width; equal widths get equal results everywhere."""
    if value not in new_widths:
        new_widths[value] = min(value, max(ROUNDED_TO, round(value * factor / ROUNDED_TO) * ROUNDED_TO))
    return new_widths[value]


def _reduce_heads(part: Part, width: int, head: int) -> None:
    has_head_width = any(HEAD_WIDTHS.search(key) for key in part.real if type(part.real[key]) is int)
    ratio = part.heads // part.groups
    heads = _small_heads(part)
    if (ratio == 1 and part.fills_width) or (not has_head_width and width % (2 * heads)):
        heads = max(1, width // head)
    for key in part.keys(HEAD_COUNTS):
        part.values[key] = heads
    for key in part.keys(GROUP_COUNTS):
        part.values[key] = max(1, heads // max(1, part.heads // part.real[key])) if part.real[key] > 1 else 1
    small = width // heads if not has_head_width or part.fills_width else min(head, part.head_width)
    _narrow_heads(part, small)


def _narrow_heads(part: Part, small: int) -> None:
    """Scales all widths inside a head by one factor, so that sums stay sums; even, as rotation takes pairs."""
    factor = small / part.head_width if part.head_width else 1.0
    for key, value in part.real.items():
        if type(value) is int and value > 1 and HEAD_WIDTHS.search(key):
            part.values[key] = max(2, 2 * round(value * factor / 2))
    if "qk_head_dim" in part.real and "qk_nope_head_dim" in part.real:
        part.values["qk_head_dim"] = part.values["qk_nope_head_dim"] + part.values["qk_rope_head_dim"]
    if "query_pre_attn_scalar" in part.real:
        part.values["query_pre_attn_scalar"] = small
    if keys := part.real.get("linear_num_key_heads"):
        for key in ("linear_num_key_heads", "linear_num_value_heads"):
            part.values[key] = max(1, part.real[key] * min(GROUPS, keys) // keys)
    for key in ("rope_parameters", "rope_scaling"):
        _shrink_rotations(part.values.get(key) or {}, factor)


def _shrink_rotations(rope: dict[str, Any], factor: float) -> None:
    """Scales the shares of a head in several rotations, as of text and images."""
    for key, shares in rope.items():
        if key.endswith("_section") and shares:
            rope[key] = [max(1, round(share * factor)) for share in shares[:-1]]
            rope[key].append(round(sum(shares) * factor) - sum(rope[key]))


def _reduce_experts(part: Part) -> None:
    """Reduces the experts, with no more per token than there are, in groups of at least two."""
    experts = part.experts
    if experts < 2:
        return
    few = min(experts, EXPERTS)
    for key, value in part.real.items():
        limit = few if EXPERT_COUNTS.search(key) else EXPERTS_USED if USED_COUNTS.search(key) else 0
        if limit and type(value) is int:
            part.values[key] = min(value, limit)
    for key in ("n_group", "num_expert_group"):
        if (groups := part.real.get(key) or 1) > 1:
            part.values[key] = min(groups, EXPERT_GROUPS)
            part.values["topk_group"] = max(1, (part.real.get("topk_group") or 1) * part.values[key] // groups)
