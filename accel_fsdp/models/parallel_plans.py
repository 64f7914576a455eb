"""The parameters that tensor and expert parallelism divide, by transformers' plans for a model."""

import re
from collections.abc import Mapping
from typing import Any

ROWS = frozenset(
    {"colwise", "colwise_gather_output", "colwise_rep", "packed_colwise", "embedding_rowwise"}
)  # of the last two dimensions, the one of a linear layer's outputs, or of a table's tokens
COLUMNS = frozenset({"rowwise", "rowwise_rep", "rowwise_split_input", "packed_rowwise", "embedding_colwise"})
DISPATCHED = "grouped_gemm"
"""Styles of transformers' plans that divide a parameter (transformers 5.23, `distributed/tensor_parallel.py` and
`expert_parallel.py`); parameters with another style, or none, are whole on each rank."""
REPLICATED = "replicated_with_grad_allreduce"
FUSED = frozenset({"qkv_proj", "query_key_value"})
QUERIES, KEYS = FUSED | {"q_proj", "q_b_proj"}, FUSED | {"k_proj"}
"""Layers whose outputs are whole heads, which the ranks of an axis share evenly or not at all."""


def cuts(model: Any) -> dict[str, int]:
    """The dimension that tensor parallelism divides, by parameter name."""
    plan: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
    found: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        style, dimensions = style_of(name, plan), parameter.dim()
        if style in ROWS:
            found[name] = max(dimensions - 2, 0)
        elif style in COLUMNS and dimensions > 1:
            found[name] = dimensions - 1
    return found


def dispatched(model: Any) -> frozenset[str]:
    """The names of the parameters whose first dimension, the experts, expert parallelism divides."""
    plan: Mapping[str, str] = getattr(model, "ep_plan", None) or {}
    return frozenset(name for name, _ in model.named_parameters() if style_of(name, plan) == DISPATCHED)


def divisible(model: Any) -> dict[str, Any]:
    """The facts of a model that decide whether an axis can divide it: fields of `ModelFacts`."""
    fused = [p for name, p in model.named_parameters() if p.dim() == 3 and "experts" in name]
    return {
        **divisible_by_config(model.config),
        "experts": max((p.shape[0] for p in fused), default=0),
        "fused_experts": sum(p.numel() for p in fused),
    }


def divisible_by_config(config: Any) -> dict[str, Any]:
    """The facts that a model's config gives; heads are 0 if the plan doesn't divide them."""
    text = config.get_text_config()
    plan: Mapping[str, str] = getattr(text, "base_model_tp_plan", None) or {}
    divided = {name.rpartition(".")[2] for name, style in plan.items() if style == "colwise"}
    tied = bool(getattr(config, "tie_word_embeddings", False))
    return {
        "heads": int(getattr(text, "num_attention_heads", None) or 0) if divided & QUERIES else 0,
        "kv_heads": int(getattr(text, "num_key_value_heads", None) or 0) if divided & KEYS else 0,
        "tensor_plan": bool(plan),
        "expert_plan": bool(getattr(text, "base_model_ep_plan", None)),
        "replicated_norms": REPLICATED in plan.values(),
        "tied_rows": int(getattr(text, "vocab_size", None) or 0) if tied else 0,
    }


def style_of(name: str, plan: Mapping[str, str]) -> str:
    """The style of a parameter: its own or that of its module, with any number for each `*` of the plan."""
    general = re.sub(r"\.\d+(?=\.|$)", ".*", name)
    return plan.get(general) or plan.get(general.rpartition(".")[0], "")
