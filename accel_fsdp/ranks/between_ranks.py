"""Compares recorded updates between ranks: copies of weights, and changes on only some ranks."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from accel_fsdp.ranks.ratios import EXACT, norm

if TYPE_CHECKING:
    from torch import nn

MOSTLY = 0.9
"""The share of a weight's elements that change where a script changes all of it: zeros may stay."""
Updates = Sequence[Mapping[str, Any]]


def copies(updates: Updates, kind: str) -> dict[str, Any] | None:
    """The first weight of which two ranks hold different copies, as under DDP and in replicas."""
    import torch

    for name in updates[0]["trained"]:
        seen: dict[str, tuple[int, torch.Tensor]] = {}
        for rank, update in enumerate(updates):
            if (placed := update[kind].get(name)) is None:
                continue
            start, part = placed
            first, other_part = seen.setdefault(f"{start} {tuple(part.shape)}", (rank, part))
            difference = norm(part - other_part) / max(norm(other_part), 1e-12)
            if part.numel() and difference > EXACT:
                return {"name": name, "ranks": [first, rank], "apart": difference}
    return None


def differs_in_training(module: "nn.Module") -> bool:
    """Whether a layer computes other values in training mode, by dropout or by a batch's statistics."""
    from torch.nn.modules.batchnorm import _BatchNorm
    from torch.nn.modules.dropout import _DropoutNd

    rates = [value for name, value in vars(module).items() if "drop" in name and isinstance(value, float)]
    return isinstance(module, _BatchNorm) or any(rates) or (isinstance(module, _DropoutNd) and module.p > 0)
