"""Observes copies of a model over the whole run: their values around each step.

A copy is in DistributedDataParallel, or in no wrapper, where the script may average gradients or weights itself.

It computes sums on each rank, without communication, so it can't hang a script.
"""

import sys
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from accel_fsdp.config import Engine
from accel_fsdp.job import from_run
from accel_fsdp.library_internals import Internal
from accel_fsdp.ranks import events, parts, script
from accel_fsdp.ranks.holding import user_name
from accel_fsdp.ranks.observing import Observation, after, before, guarded
from accel_fsdp.ranks.weights import is_sharded, sums

if TYPE_CHECKING:
    import torch
    from torch import nn

COPIES = Observation(
    "copies of models under DistributedDataParallel",
    Internal("torch.nn.parallel:DistributedDataParallel.__init__", "self module *"),
    Internal("torch.nn:Module.requires_grad_", "self requires_grad"),
    Internal("torch.nn:Module.load_state_dict", "self *"),
    Internal("torch:Tensor.requires_grad_"),
    Internal("torch.optim.optimizer:register_optimizer_step_post_hook", "hook"),
)
RELIES_ON = COPIES.relies_on


@dataclass
class _Copy:
    """A model's weights that all ranks must change in the same way, also if the script drops the model.

    `frozen`: those for which DDP averages no gradients. `last`: sum and norm of each after the last step.
    """

    number: int
    model: "weakref.ref[nn.Module]"
    weights: "dict[str, torch.Tensor]"
    frozen: frozenset[str]
    last: dict[str, tuple[float, float]] = field(default_factory=dict)

    def sums(self) -> dict[str, tuple[float, float]]:
        return {name: sums(parts.local(weight)) for name, weight in self.weights.items() if weight.requires_grad}


class ObservedCopies:
    """`since` is the sum of all copies' weights after the last step; lines are those of the script's latest calls."""

    def __init__(self) -> None:
        self.copies: list[_Copy] = []
        self.count = self.backwards = 0
        self.is_due = False
        self.since: float | None = None
        self.loaded_at = self.unfrozen_at = self.backward_line = ""

    def install(self) -> None:
        from torch.nn.parallel import DistributedDataParallel
        from torch.optim.optimizer import register_optimizer_step_post_hook

        after(DistributedDataParallel, "__init__", self._wrapped)
        register_optimizer_step_post_hook(guarded(self._after_step))

    def _wrapped(self, model: Any, *_: Any, **__: Any) -> None:
        ignored = getattr(model.module, "_ddp_params_and_buffers_to_ignore", ())
        weights = {user_name(name): p for name, p in model.module.named_parameters() if name not in ignored}
        self._add(model, weights, frozenset(name for name, weight in weights.items() if not weight.requires_grad))

    def begin(self, models: "Iterable[nn.Module]", optimizer: Any) -> None:
        """Called before the first step: adds the models of this optimizer that no wrapper averages."""
        trained = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
        for model in models:
            weights: dict[str, torch.Tensor] = dict(model.named_parameters())
            known = {id(weight) for copy in self.copies for weight in copy.weights.values()}
            ids = set(map(id, weights.values()))
            is_alone = from_run.engine_of(model) == Engine.NONE.label and not any(map(is_sharded, weights.values()))
            if is_alone and ids & trained and not ids & known:
                self._add(model, weights)
                self.is_due = True

    def _add(
        self, model: "nn.Module", weights: "dict[str, torch.Tensor]", frozen: frozenset[str] = frozenset()
    ) -> None:
        import torch

        if not self.count:
            before(torch.nn.Module, "load_state_dict", self._note_load)
            for owner in (torch.nn.Module, torch.Tensor):
                before(owner, "requires_grad_", self._note_unfreezing)
        self.count += 1
        self.copies = [copy for copy in self.copies if copy.model() is not None]
        self.copies.append(_Copy(self.count, weakref.ref(model), weights, frozen))

    def _note_load(self, *_: Any, **__: Any) -> None:
        self.loaded_at = script.line_of_stack(sys._getframe(2))

    def _note_unfreezing(self, _: Any, requires_grad: bool = True) -> None:
        if requires_grad:
            self.unfrozen_at = script.line_of_stack(sys._getframe(2)) or self.unfrozen_at

    def ran_backward(self) -> None:
        if self.copies:
            self.backwards += 1
            self.is_due = True
            self.backward_line = self.backward_line or script.line_of_stack(sys._getframe(2))

    def before_step(self, optimizer: Any) -> dict[str, Any]:
        """What the ranks must have in common at a step, if the optimizer has weights of a copy; else empty."""
        shared = {id(weight) for copy in self.copies for weight in copy.weights.values()}
        if not any(id(weight) in shared for group in optimizer.param_groups for weight in group["params"]):
            return {}
        content: dict[str, Any] = {"backwards": self.backwards, "loaded_at": self.loaded_at}
        if self.is_due:
            content |= {"since": self.since, "before": _total(copy.sums() for copy in self.copies)}
        self.loaded_at = ""
        return content

    def _after_step(self, *_: Any, **__: Any) -> None:
        """Reads the weights once after each backward pass: an optimizer may step for each weight."""
        if self.is_due:
            self.is_due = False
            for copy in self.copies:
                copy.last = copy.sums()
            self.since = _total(copy.last for copy in self.copies)

    def report_end(self) -> None:
        unfrozen_at = self.unfrozen_at or script.line_above(self.backward_line, "requires_grad")
        for copy in self.copies:
            end, lines = copy.sums(), {"backward_line": self.backward_line, "unfrozen_at": unfrozen_at}
            unfrozen = sorted(copy.frozen & end.keys())
            events.report("copies", number=copy.number, last=copy.last, end=end, unfrozen=unfrozen, **lines)


def _total(copies: Iterable[Mapping[str, tuple[float, float]]]) -> float:
    return sum(total for copy in copies for total, _ in copy.values())
