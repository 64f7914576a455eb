"""Losses that transformers' Trainer computes around the model's forward pass, which a repetition leaves out.

They may depend on changes by FSDP: FSDP2 renames the model's class, by which Trainer decides whether to shift labels.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from accel_fsdp.launch.ranks import accumulation, script
from accel_fsdp.launch.ranks.observing import Observation, replace
from accel_fsdp.launch.ranks.outputs import tensors_in
from accel_fsdp.launch.ranks.ratios import EXACT, norm, ratio
from accel_fsdp.launch.ranks.records import Forward, Unrecordable, recorded
from accel_fsdp.library_internals import Internal

if TYPE_CHECKING:
    import torch
    from torch import nn

RELIES_ON = (
    Internal("transformers.trainer:Trainer.compute_loss", "self model inputs return_outputs *"),
    Internal("transformers.trainer:Trainer.training_step", "self model inputs num_items_in_batch"),
    Internal("transformers.trainer:Trainer._inner_training_loop", "self *"),
)
LOSSES = Observation("the losses that Trainer computes itself", *RELIES_ON)


@dataclass(frozen=True)
class TrainerLoss:
    """A call of `compute_loss`, to be repeated with another model: its forward pass, and the update.

    `line` is where the script defines the method; empty for Trainer's own. `has_own_step`: the script also defines
    the training_step that calls backward.
    """

    update: int
    forward: Forward
    original: Callable[..., Any]
    arguments: inspect.BoundArguments
    line: str = ""
    has_own_step: bool = False

    def flaw(self, model: "nn.Module", tolerance: float) -> dict[str, Any] | None:
        """Whether the gradients of Trainer's loss differ for this model, or the script's loss isn't divided."""
        if self.line:
            batches = int(self.arguments.arguments["self"].current_gradient_accumulation_steps)
            content = {"what": "divided", "ratio": batches, "accumulation": batches, "line": self.line}
            if self.has_own_step:  # and the mistake is in its backward pass
                content |= {"line": "", "in_trainer": True}
            return content if batches > 1 and self._is_undivided(model, tolerance) else None
        difference = self._distance(model)
        return {"what": "trainer-loss", "apart": difference, "line": ""} if difference > tolerance else None

    def _distance(self, model: "nn.Module") -> float:
        """How far the recorded gradients of the outputs are from a multiple of those with this model."""
        recorded = self._recorded()
        if not recorded:
            return 0.0
        repeated = self._gradients(model)
        factor = ratio(recorded, repeated)
        return max(
            norm(gradient - factor * repeated[n]) / norm(gradient) if n in repeated else 1.0
            for n, gradient in recorded.items()
        )

    def _recorded(self) -> "dict[str, torch.Tensor]":
        gradients = enumerate(self.forward.gradients)
        return {str(n): gradient for n, gradient in gradients if gradient is not None and n != self.forward.loss}

    def _is_undivided(self, model: "nn.Module", tolerance: float) -> bool:
        """Whether backward got the loss as it is, a mean over the micro-batch, whatever the step's other ones are.

        Such a loss depends neither on the number of tokens that Trainer counts in the step nor on that of its
        micro-batches, and rows that come twice don't change it.
        """
        recorded = self._recorded()
        repeated = self._gradients(model)
        if not recorded or abs(ratio(recorded, repeated) - 1) > tolerance:
            return False
        model.eval()  # dropout would draw other numbers for twice the rows
        arguments = self.arguments.arguments
        value = self._value(model)
        others = [self._value(model, twice(arguments["inputs"]))]
        named = [arguments, *(argument for argument in arguments.values() if isinstance(argument, dict))]  # or **kwargs
        for values in (values for values in named if values.get("num_items_in_batch") is not None):
            with patch.dict(values, num_items_in_batch=2 * values["num_items_in_batch"]):
                others.append(self._value(model))
        trainer = arguments["self"]
        steps, of_args = 2 * trainer.current_gradient_accumulation_steps, 2 * trainer.args.gradient_accumulation_steps
        with (
            patch.object(trainer, "current_gradient_accumulation_steps", steps),
            patch.object(trainer.args, "gradient_accumulation_steps", of_args),
        ):
            others.append(self._value(model))
        return all(abs(other - value) <= EXACT * abs(value) for other in others)

    def _value(self, model: "nn.Module", inputs: Mapping[str, Any] | None = None) -> float:
        import torch

        with torch.no_grad():
            return float(self._call(model, False, inputs))

    def _call(self, model: "nn.Module", return_outputs: bool, inputs: Mapping[str, Any] | None = None) -> Any:
        """Calls the method with another model, and the recorded inputs or others."""
        arguments = self.arguments.arguments
        recorded = arguments["inputs"]
        copied = dict(recorded if inputs is None else inputs)  # the method may take labels out
        arguments |= {"model": model, "return_outputs": return_outputs, "inputs": copied}
        try:
            return self.original(*self.arguments.args, **self.arguments.kwargs)
        finally:
            arguments["inputs"] = recorded

    def _gradients(self, model: "nn.Module") -> "dict[str, torch.Tensor]":
        """The gradients of the loss with respect to this model's outputs, by the number of the output."""
        import torch

        with torch.enable_grad():
            loss, outputs = self._call(model, True)
        tensors = {str(number): tensor for number, tensor in enumerate(tensors_in(outputs)) if tensor.requires_grad}
        gradients = torch.autograd.grad(loss, list(tensors.values()), allow_unused=True)
        return {number: gradient for number, gradient in zip(tensors, gradients, strict=True) if gradient is not None}


class TrainerLosses:
    """Records the calls; `newest` gives the number of the current update, and its last recorded forward pass."""

    def __init__(self, newest: Callable[[], tuple[int, Forward | None]]) -> None:
        self.newest = newest
        self.calls: list[TrainerLoss] = []
        self.is_watched = False

    def watch(self) -> None:
        """Called before something is prepared: wraps the method if the script has imported Trainer by now."""
        trainer = sys.modules.get("transformers.trainer")
        if not self.is_watched and trainer is not None and LOSSES.is_possible:
            self.is_watched = True
            replace(trainer.Trainer, "compute_loss", self._record_loss)
        if self.is_watched and (running := accumulation.running_trainer()) is not None:
            self._watch_own(running)

    def _watch_own(self, trainer: Any) -> None:
        """Wraps the method that the script defines in a class of its own."""
        kind: Any = next((kind for kind in type(trainer).__mro__ if "compute_loss" in vars(kind)), type(trainer))
        code = getattr(kind.compute_loss, "__code__", None)
        if code is None or hasattr(kind.compute_loss, "__wrapped__"):
            return
        if not inspect.signature(kind.compute_loss).parameters.keys() >= {"self", "model", "inputs", "return_outputs"}:
            return  # it passes on what it gets
        if line := script.line_of([(code.co_filename, code.co_firstlineno)]):
            own_step = getattr(type(trainer).training_step, "__code__", None)
            has_own_step = own_step is not None and script.is_own(own_step.co_filename)
            record = functools.partial(self._record_loss, line=line, has_own_step=has_own_step)
            replace(kind, "compute_loss", record)

    def _record_loss(
        self,
        original: Callable[..., Any],
        *args: Any,
        line: str = "",
        has_own_step: bool = False,
        **kwargs: Any,
    ) -> Any:
        _, before = self.newest()
        arguments = inspect.signature(original).bind(*args, **kwargs)
        try:
            inputs = recorded(arguments.arguments["inputs"])  # before Trainer removes the labels
        except Unrecordable:
            return original(*args, **kwargs)
        result = original(*args, **kwargs)
        update, forward = self.newest()
        if forward is not None and forward is not before:
            arguments.arguments["inputs"] = inputs
            self.calls.append(TrainerLoss(update, forward, original, arguments, line, has_own_step))
        return result


def twice(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The batch with each row twice: tensors and lists of as many items as the first tensor has rows."""
    import torch

    rows = next(len(value) for value in inputs.values() if isinstance(value, torch.Tensor) and value.dim())

    def of(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dim() and len(value) == rows:
            return torch.cat([value, value])
        return value + value if isinstance(value, list) and len(value) == rows else value

    return {name: of(value) for name, value in inputs.items()}
