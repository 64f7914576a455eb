"""Observes whether models that began in training mode end in evaluation mode, without dropout."""

import sys
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

from accel_fsdp.library_internals import Internal
from accel_fsdp.ranks import events, script
from accel_fsdp.ranks.between_ranks import differs_in_training
from accel_fsdp.ranks.observing import Observation, before

if TYPE_CHECKING:
    from torch import nn

MODES = Observation("calls of eval()", Internal("torch.nn:Module.train", "self mode"))


class ObservedModes:
    """`since`: the first of the last steps in which a model is in evaluation mode, 0 if it isn't any more."""

    def __init__(self) -> None:
        self.models: list[weakref.ref[nn.Module]] | None = None
        self.since = self.steps = 0
        self.line = ""

    def install(self) -> None:
        from torch import nn

        before(nn.Module, "train", self._note_line)

    def _note_line(self, module: "nn.Module", mode: bool = True) -> None:
        caller = sys._getframe(2)
        is_child = (caller.f_code.co_name, caller.f_globals.get("__name__")) == ("train", "torch.nn.modules.module")
        if not mode and not is_child and (line := script.line_of_stack(caller)):
            self.line = line

    def ran_backward(self, models: "Iterable[nn.Module]", step: int) -> None:
        """Called after each backward pass; `models` are those that ran forward before the first step."""
        if self.models is None:
            may_change = (
                model for model in models if model.training and any(map(differs_in_training, model.modules()))
            )
            self.models = [weakref.ref(model) for model in may_change]
        self.steps = step
        is_evaluating = any((model := kept()) is not None and not model.training for kept in self.models)
        self.since = (self.since or step) if is_evaluating else 0

    def report_end(self) -> None:
        if self.since and self.steps > self.since:  # one alone may be another model's, as in a GAN
            events.report("evaluates-on", since=self.since, steps=self.steps, line=self.line)
