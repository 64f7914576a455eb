"""Observes weights that have gradients in a step and are in no optimizer, over the whole run."""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accel_fsdp.job import from_run
from accel_fsdp.ranks import events, parts
from accel_fsdp.ranks.gradients import nonzero_part
from accel_fsdp.ranks.holding import user_name
from accel_fsdp.ranks.weights import checksum

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class _Uncovered:
    """A weight in no optimizer, with the checksum of this rank's part at the first step that it had a gradient."""

    number: int
    first: int


class UncoveredWeights:
    """Looks at the weights at the first step of an optimizer after each backward pass.

    A weight that joins an optimizer later, or that the script changes itself, is trained as well.
    """

    def __init__(self) -> None:
        self.models: list[weakref.ref[nn.Module]] = []
        self.frozen: set[int] = set()
        self.covered: set[int] = set()
        self.uncovered: dict[str, _Uncovered] = {}
        self.has_new_gradients = False

    def begin(self, models: Iterable["nn.Module"]) -> None:
        """Called at the first step with the trained models. DeepSpeed keeps gradients elsewhere."""
        self.models = [weakref.ref(model) for model in models if not from_run.is_deepspeed(model)]
        self.frozen = {id(weight) for _, weight in self._weights() if not weight.requires_grad}

    def before_backward(self) -> None:
        self.has_new_gradients = True

    def before_step(self, optimizer: Any) -> None:
        self.covered |= {id(weight) for group in optimizer.param_groups for weight in group["params"]}
        if not self.has_new_gradients or not self.models:
            return
        self.has_new_gradients = False
        for name, weight in self._weights():
            is_new = weight.requires_grad and id(weight) not in self.covered and name not in self.uncovered
            if is_new and nonzero_part(weight) is not None:
                self.uncovered[name] = _Uncovered(id(weight), checksum(parts.local(weight)))

    def report_end(self, added_at: str) -> None:
        """Reports the weights that never changed on this rank, those that did, and those that were frozen at first.

        `added_at` is the line that added weights to an optimizer, `strange` the number of those that no model has.
        """
        weights = dict(self._weights())
        kept, trained, thawed = list[str](), list[str](), list[str]()
        for name, weight in self.uncovered.items():
            is_same = name in weights and checksum(parts.local(weights[name])) == weight.first
            (kept if is_same and weight.number not in self.covered else trained).append(name)
            thawed += [name] if weight.number in self.frozen else []
        if self.uncovered:
            count = sum(weight.requires_grad for weight in weights.values())
            strange = len(self.covered - {id(weight) for weight in weights.values()})
            counts = {"count": count, "strange": strange}
            events.report("uncovered", kept=kept, trained=trained, thawed=thawed, added_at=added_at, **counts)

    def _weights(self) -> Iterable[tuple[str, Any]]:
        models = (model for model_ref in self.models if (model := model_ref()) is not None)
        return [(user_name(name), weight) for model in models for name, weight in model.named_parameters()]
