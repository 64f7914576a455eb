"""Losses that transformers' Trainer computes around the model's forward pass, which a repetition leaves out.

They may depend on changes by FSDP: FSDP2 renames the model's class, by which Trainer decides whether to shift labels.
"""

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accel_fsdp.launch.ranks.observing import Observation, replace
from accel_fsdp.launch.ranks.outputs import tensors_in
from accel_fsdp.launch.ranks.ratios import norm, ratio
from accel_fsdp.launch.ranks.records import Forward, Unrecordable, recorded
from accel_fsdp.library_internals import Internal

if TYPE_CHECKING:
    import torch
    from torch import nn

RELIES_ON = (Internal("transformers.trainer:Trainer.compute_loss", "self model inputs return_outputs *"),)
LOSSES = Observation("the losses that Trainer computes itself", RELIES_ON)


@dataclass(frozen=True)
class TrainerLoss:
    """A call of `compute_loss`, to be repeated with another model: its forward pass, and the update."""

    update: int
    forward: Forward
    original: Callable[..., Any]
    arguments: inspect.BoundArguments

    def distance(self, model: "nn.Module") -> float:
        """How far the recorded gradients of the outputs are from a multiple of those with this model."""
        gradients = enumerate(self.forward.gradients)
        recorded = {str(n): gradient for n, gradient in gradients if gradient is not None and n != self.forward.loss}
        if not recorded:
            return 0.0
        repeated = {str(n): gradient for n, gradient in self._gradients(model).items()}
        factor = ratio(recorded, repeated)
        return max(
            norm(gradient - factor * repeated[n]) / norm(gradient) if n in repeated else 1.0
            for n, gradient in recorded.items()
        )

    def _gradients(self, model: "nn.Module") -> "Mapping[int, torch.Tensor]":
        """The gradients of the loss with respect to this model's outputs, by the number of the output."""
        import torch

        self.arguments.arguments |= {"model": model, "return_outputs": True}
        with torch.enable_grad():
            loss, outputs = self.original(*self.arguments.args, **self.arguments.kwargs)
        tensors = {number: tensor for number, tensor in enumerate(tensors_in(outputs)) if tensor.requires_grad}
        gradients = torch.autograd.grad(loss, list(tensors.values()), allow_unused=True)
        return {number: gradient for number, gradient in zip(tensors, gradients, strict=True) if gradient is not None}


class TrainerLosses:
    """Records the calls; `newest` gives the number of the current update, and its last recorded forward pass."""

    def __init__(self, newest: Callable[[], tuple[int, Forward | None]]) -> None:
        self.newest = newest
        self.calls: list[TrainerLoss] = []
        self.is_watched = False

    def watch(self) -> None:
        """Wraps the method if the script has imported Trainer by now."""
        trainer = sys.modules.get("transformers.trainer")
        if not self.is_watched and trainer is not None and LOSSES.is_possible:
            self.is_watched = True
            replace(trainer.Trainer, "compute_loss", self._record_loss)

    def _record_loss(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
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
            self.calls.append(TrainerLoss(update, forward, original, arguments))
        return result
