"""Stops a run whose loss, gradient norm or weights are NaN or infinite: every later step would be NaN too.

Trainer would go on, with zeros in its log (transformers 5.23).
"""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from accel_fsdp import console
from accel_fsdp.checkpoints import clean_name, completeness
from accel_fsdp.errors import UsageError, UserError
from accel_fsdp.units import first_few

SKIPPED_IN_A_ROW = 40
"""Steps in a row that fp16's scaler may skip: it halves its scale each time, and would have reached 0 from 2 ** 16."""


class Diverged(UserError):
    """A loss, a gradient norm or a weight is NaN or infinite. All ranks raise it in the same step."""


class FiniteCheck(TrainerCallback):  # type: ignore[misc]
    """Checks each step's loss and gradient norm, and the weights. Call its methods on all ranks.

    With `--ignore_nan_inf`, steps that aren't finite are skipped instead.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.args = trainer, trainer.args
        self.step_loss: Tensor | float = 0.0
        """This rank's loss, summed over the micro-batches of the step so far."""
        self._skipped = 0
        if self.args.ignore_nan_inf and trainer.is_deepspeed_enabled:
            raise UsageError(
                "--ignore_nan_inf under DeepSpeed",
                why="it updates the weights during backward, so no step can be skipped",
                fix="leave it out",
            )

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Refuses NaN and infinite weights before training, so that they aren't blamed on the learning rate."""
        if names := self._non_finite_weights():
            weights = self.trainer.resumed or self.trainer.model.config.get_text_config()._name_or_path or "this one"
            raise UserError(
                f"the loaded weights hold NaN or infinite values: {first_few(names, 1)}",
                why="training can't repair NaN or infinite weights",
                fix=f"another checkpoint: {weights} is broken",
            )

    def check_step(self, norm: Tensor | float | None) -> None:
        """Checks the step's loss and gradient norm, the only time in a step that the host waits for the device.

        Raises:
            Diverged: one of them is NaN or infinite.
        """
        numbers = (self.step_loss, 0.0 if norm is None else norm)
        self.step_loss = 0.0
        local = torch.stack(
            [torch.as_tensor(number, dtype=torch.float32, device=self.args.device) for number in numbers]
        )
        loss, length = self.trainer.accelerator.gather(local[None]).mean(0).tolist()
        if math.isfinite(loss) and math.isfinite(length):
            self._skipped = 0
            return
        self._skipped += 1
        if math.isfinite(loss) and self._scales_gradients() and self._skipped < SKIPPED_IN_A_ROW:
            return  # the scaler leaves this step out and tries a smaller scale
        state = self.trainer.state
        what = f"in step {state.global_step + 1} the loss is {loss:.4g}, the gradient norm {length:.4g}"
        if not self.args.ignore_nan_inf:
            state.global_step += 1  # the log line belongs to this step, which is never completed
            self.trainer.log({"loss": loss, "grad_norm": length, "learning_rate": self.trainer._get_learning_rate()})
            state.global_step -= 1
            raise self.diverged(what)
        self._log(f"{what}; its update is left out")
        if not self._scales_gradients():
            for parameter in self.trainer.model.parameters():
                parameter.grad = None

    def may_save(self) -> bool:
        """Whether the weights are finite, so that the last checkpoint can always be resumed.

        Raises:
            Diverged: they aren't finite.
        """
        if not self._non_finite_weights():
            return True
        if not self.args.ignore_nan_inf:
            self.check_weights()
        self._log(f"{self._weights_diverged()}: no checkpoint is written")
        return False

    def check_weights(self) -> None:
        """Raises Diverged if a weight is not finite."""
        if self._non_finite_weights():
            raise self.diverged(self._weights_diverged())

    def diverged(self, what: str) -> Diverged:
        newest = completeness.choose(Path(self.args.output_dir)).newest
        rate = f"a lower --learning_rate than {self.args.learning_rate:g}, more --warmup_steps"
        clip = "" if 0 < self.args.max_grad_norm <= 1 else ", --max_grad_norm 1"
        precision = ", mixed_precision: bf16 in the YAML" if self._scales_gradients() else ""
        resume = f"; --resume_from_checkpoint true goes on from {newest.name}" if newest else ""
        leave_out = "" if self.args.ignore_nan_inf else "; or --ignore_nan_inf true to leave such steps out"
        return Diverged(
            f"training diverged: {what}",
            why=f"every later step would be NaN too; the last finite weights are in {newest}"
            if newest
            else "every later step would be NaN too; no checkpoint was written before",
            fix=f"{rate}{clip}{precision}{resume}{leave_out}",
        )

    def _weights_diverged(self) -> str:
        return f"after step {self.trainer.state.global_step} the weights hold NaN or infinite values"

    def _non_finite_weights(self) -> list[str]:
        """The names of trained parameters with NaN or infinite values on any rank."""
        parameters = self.trainer.model.named_parameters()
        trained = {clean_name(name): p for name, p in parameters if p.requires_grad and p.is_floating_point()}
        flags = torch.zeros(len(trained), dtype=torch.bool, device=self.args.device)
        for index, part in enumerate(map(_local, trained.values())):
            if part.numel():
                flags[index] = ~torch.stack(torch.aminmax(part)).float().isfinite().all()
        non_finite = self.trainer.accelerator.gather(flags[None]).any(0).tolist()
        return [name for name, is_odd in zip(trained, non_finite, strict=True) if is_odd]

    def _scales_gradients(self) -> bool:
        return bool(self.trainer.accelerator.mixed_precision == "fp16")

    def _log(self, text: str) -> None:
        if self.args.process_index == 0:
            console.say(text, style="yellow")


@torch.no_grad()
def _local(parameter: nn.Parameter) -> Tensor:
    """This rank's part of a parameter; under ZeRO-3 it is in an attribute."""
    part: Tensor = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    part = getattr(part, "ds_tensor", part)
    return part.detach()
