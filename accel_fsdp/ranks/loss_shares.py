"""Checks that losses divided by a count of tokens add up to one mean over a step. Pure."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from accel_fsdp.ranks.outputs import tensors_in
from accel_fsdp.ranks.ratios import EXACT

COUNTED = 0.02
"""How near a sum must be to a wrong one, where tokens are counted: some models count one too many in each row."""
IGNORED = -100
"""The label of tokens that aren't trained."""


def flaw(updates: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The ratio of an update's gradients to those of the mean over its tokens; None if it is 1 or undefined.

    Each rank's loss is a sum over its tokens, divided by those of all ranks: the shares add up to the mean over all
    tokens. Trainer multiplies by the ranks, as FSDP averages over them. Where it counts ranks that see the same rows,
    as those of tensor parallelism, the gradients are several times as large.
    """
    total, ranks, batches = 0.0, len(updates), len(updates[0]["forwards"])
    for forward in (forward for update in updates for forward in update["forwards"]):
        sent = {number: gradient for number, gradient in enumerate(forward["gradients"]) if gradient is not None}
        inputs = forward["inputs"][1]
        labels, count = inputs.get("labels"), inputs.get("num_items_in_batch")
        if sent.keys() != {forward["loss"]} or labels is None or count is None or labels.dim() != 2:
            return None
        tokens = int((labels[:, 1:] != IGNORED).sum())
        total += float(sent[forward["loss"]]) * tokens / float(count) / ranks
    ratios = {ranks, 1 / ranks, batches, 1 / batches, ranks * batches, 1 / ranks / batches} - {1}
    match = next((match for match in ratios if math.isclose(total, match, rel_tol=COUNTED)), None)
    return {"ratio": match, "ranks": ranks, "accumulation": batches} if match else None


def of_batches(forwards: Sequence[Mapping[str, Any]]) -> list[float]:
    """The gradient of each loss that the model itself computed; empty if the step's loss uses other outputs."""
    has_others = any(g is not None for f in forwards for n, g in enumerate(f["gradients"]) if n != f["loss"])
    is_counted = any("num_items_in_batch" in forward["inputs"][1] for forward in forwards)
    if has_others or is_counted or any(f["loss"] is None or f["gradients"][f["loss"]] is None for f in forwards):
        return []
    return [float(forward["gradients"][forward["loss"]]) for forward in forwards]


def misdivided(update: Mapping[str, Any], ranks: int) -> dict[str, Any] | None:
    """The gradients of the losses that the model itself computed add up to 1 over a step, if each is divided once."""
    accumulation, shares = update["accumulation"], of_batches(update["forwards"])
    if accumulation > 1 and len(shares) == accumulation:
        kinds = {"undivided": accumulation, "divided": 1 / accumulation}
        what = next((what for what, times in kinds.items() if abs(sum(shares) / times - 1) < EXACT), "")
        return {"what": what, "accumulation": accumulation} if what else None
    is_early = len(shares) < accumulation and update["midway"]
    is_late = len(shares) > accumulation > 1 and len(shares) == update["backwards"] == _batches(update)
    if (is_early or is_late) and each(shares, 1 / accumulation):
        return {"what": "other-step", "batches": len(shares), "accumulation": accumulation}
    if shares and ranks not in (1, len(shares)) and each(shares, ranks / len(shares)):
        return {"what": "multiplied", "ranks": ranks}
    return None


def each(shares: Sequence[float], value: float) -> bool:
    return bool(shares) and all(abs(share / value - 1) < EXACT for share in shares)


def _batches(update: Mapping[str, Any]) -> int:
    """The number of different batches in the forward passes: a loss may use several passes over one batch."""
    kept: list[Any] = []
    for forward in update["forwards"]:
        tensor = next(tensors_in(forward["inputs"]), None)
        if tensor is not None and not any(tensor.equal(other) for other in kept):
            kept.append(tensor)
    return len(kept)
