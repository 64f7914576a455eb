"""The plain loop of `proofs.py`: the loss of a step is the mean over the tokens of all ranks and micro-batches.

It reads what the ranks recorded of their steps, the rows and the weights before, and computes the gradients in one
process without any trainer. So it sees what a repetition of the same script can't: a loss that the script itself
divides by another number, or takes of other labels.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import proofs_case
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from accel_fsdp.ranks import parts, ratios
from accel_fsdp.ranks.records import united

IGNORED = -100
FLOOR = 1e-2
"""Gradients smaller than this part of the largest are compared with that part of it, as they may be noise."""


@dataclass(frozen=True)
class Compared:
    """The largest difference of a weight's gradient, relative to its norm; the ratio of that weight's and of all."""

    apart: float
    name: str
    ratio: float
    of_all: float


def compare(records: Path, model_folder: Path, adapter: proofs_case.Adapter, smoothing: float) -> list[Compared]:
    """Compares the gradients of each recorded update with those of the plain loop."""
    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32, trust_remote_code=False)
    if adapter.use_peft:
        model = proofs_case.adapted(model, adapter)
    numbers = sorted({path.name.partition(".")[2] for path in records.iterdir()})
    of_updates = [united([torch.load(path) for path in sorted(records.glob(f"*.{number}"))]) for number in numbers]
    return [_compared(model, updates, smoothing) for updates in of_updates]


def _compared(model: Any, updates: Sequence[Mapping[str, Any]], smoothing: float) -> Compared:
    weights = dict(model.named_parameters())
    first = updates[0]
    reduced = _whole(weights, [update["reduced"] for update in updates])
    with torch.no_grad():
        for name, value in _whole(weights, [update["weights"] for update in updates]).items():
            weights[name].copy_(value.to(torch.bfloat16) if first["cast"] == "bf16" else value)
    for name, weight in weights.items():
        weight.requires_grad_(name in first["trained"])
        weight.grad = None
    _loss(model, updates, smoothing).backward()  # type: ignore[no-untyped-call]
    alone = {name: weight.grad for name, weight in weights.items() if weight.grad is not None}
    largest = max(map(ratios.norm, alone.values()))
    apart = {}
    for name, gradient in alone.items():
        theirs = reduced.get(name, torch.zeros(()))
        size = max(ratios.norm(gradient), FLOOR * largest)
        apart[name] = ratios.norm(gradient - theirs.float()) / size
    worst = max(apart, key=lambda name: math.inf if math.isnan(apart[name]) else apart[name])
    own = ratios.ratio({worst: reduced.get(worst, torch.zeros_like(alone[worst]))}, {worst: alone[worst]})
    return Compared(apart[worst], worst, own, ratios.ratio(reduced, alone))


def _whole(weights: Mapping[str, torch.Tensor], of_ranks: Sequence[Any]) -> dict[str, torch.Tensor]:
    names = dict.fromkeys(name for held in of_ranks for name in held)
    values = {name: parts.whole(weights[name].shape, name, of_ranks) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _loss(model: Any, updates: Sequence[Mapping[str, Any]], smoothing: float) -> torch.Tensor:
    total, tokens = torch.zeros(()), 0
    is_bf16 = updates[0]["precision"] == "bf16"
    with torch.autocast("cpu", torch.bfloat16) if is_bf16 else nullcontext():
        for forward in (forward for update in updates for forward in update["forwards"]):
            inputs = forward["inputs"][1]
            targets = _targets(inputs)
            taken = {name: inputs[name] for name in ("input_ids", "attention_mask", "position_ids") if name in inputs}
            logits = model(**taken, use_cache=False).logits.float()
            total = total + F.cross_entropy(
                logits.flatten(0, 1), targets.flatten(), reduction="sum", label_smoothing=smoothing
            )
            tokens += int((targets != IGNORED).sum())
    return total / tokens


def _targets(inputs: Mapping[str, Any]) -> torch.Tensor:
    """The token that each position has to predict: the next one of its text.

    Where a script keeps the labels from the model, they are all tokens of a text.
    """
    if "shift_labels" in inputs:
        return torch.as_tensor(inputs["shift_labels"])
    if "labels" in inputs:
        return F.pad(inputs["labels"][:, 1:], (0, 1), value=IGNORED)
    labels: torch.Tensor = inputs["input_ids"].clone()
    if (mask := inputs.get("attention_mask")) is not None and mask.dim() == 2:
        labels[mask == 0] = IGNORED
    if (places := inputs.get("position_ids")) is not None:
        labels[places == 0] = IGNORED
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)
