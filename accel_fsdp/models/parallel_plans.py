"""What tensor and expert parallelism divide of a model, by the plans that transformers has for it."""

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


def cuts(model: Any) -> dict[str, int]:
    """The dimension that tensor parallelism divides, by the name of the parameter."""
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


def style_of(name: str, plan: Mapping[str, str]) -> str:
    """The style of a parameter: its own or that of its module, with any number for each `*` of the plan."""
    general = re.sub(r"\.\d+(?=\.|$)", ".*", name)
    return plan.get(general) or plan.get(general.rpartition(".")[0], "")
