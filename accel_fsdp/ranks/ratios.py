"""Compares gradients of the ranks with others, by their ratio or a common factor, and copies with each other."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

EXACT = 1e-3
"""The largest relative difference of a weight's gradient or update in float32. 1e-7 was measured."""


def norm(values: "torch.Tensor") -> float:
    return float(values.float().norm())


def ratio(gradients: Mapping[str, "torch.Tensor"], plain: Mapping[str, "torch.Tensor"]) -> float:
    """The ratio of the gradients to the plain ones: their projection on the plain gradients."""
    pairs = [(gradients[name].float().flatten(), plain[name].float().flatten()) for name in plain if name in gradients]
    square = sum(float(reference.double().dot(reference.double())) for _, reference in pairs)
    if not square:
        return 0.0
    return sum(float(gradient.double().dot(reference.double())) for gradient, reference in pairs) / square


def is_changed(update: Mapping[str, Any]) -> bool:
    """Whether a rank's gradients changed between backward and step by more than a common factor."""
    return (
        bool(update["used"])
        and factor(update["reduced"], update["used"]) is None
        and any(bool(part.any()) for _, part in update["used"].values())
    )


def factor(reduced: Mapping[str, Any], used: Mapping[str, Any]) -> float | None:
    """The factor by which a rank scaled its parts of the gradients; None without parts, or if it isn't one number."""
    before = {name: part for name, (_, part) in reduced.items() if name in used}
    after = {name: used[name][1] for name in before}
    common = ratio(after, before)
    size = math.sqrt(sum(norm(part) ** 2 for part in after.values()))
    residual = math.sqrt(sum(norm(after[name] - common * part) ** 2 for name, part in before.items()))
    return common if size and residual <= EXACT * size else None


def differing_copies(updates: Sequence[Mapping[str, Any]], kind: str) -> dict[str, Any] | None:
    """The first weight of which two ranks hold different copies, as under DDP and in replicas."""
    for name in updates[0]["trained"]:
        seen: dict[str, tuple[int, torch.Tensor]] = {}
        for rank, update in enumerate(updates):
            if (placed := update[kind].get(name)) is None:
                continue
            start, part = placed
            first, other_part = seen.setdefault(f"{start} {tuple(part.shape)}", (rank, part))
            if part.numel() and norm(part - other_part) > EXACT * max(norm(other_part), 1e-12):
                return {"name": name, "ranks": [first, rank]}
    return None
