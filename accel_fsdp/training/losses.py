"""The losses of a run: the training loss and the held-out loss, as a plain loop would compute them.

Trainer's faults (transformers 5.23; where a fault has no report, docs/upstream.md has it or none was filed):

- it shifts the labels for `--label_smoothing_factor` only if it knows the class's name, which FSDP2 changes;
- it counts one token too many per row for classes that aren't called ForCausalLM;
- it gives the model that count as a float, which FSDP rounds to the dtype that it computes in;
- it counts rows twice that fill the last step of an epoch;
- it weights a router's loss by the number of micro-batches (#37766);
- it divides each rank's held-out loss by the tokens of all ranks (#34373), and drops some ranks' part of the last batch
  (#41898);
- on a mesh it counts tokens of ranks that hold the same rows (#45994, #39648).
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from accel_fsdp import console
from accel_fsdp.errors import UserError
from accel_fsdp.training.data import IGNORED, batching

OTHER_LOSS = 2e-4
"""The largest relative difference of two losses, both in float32 from the same logits, whose sums differ in order."""
ROUTER_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")
"""Names of the weight of the router's loss in the layers and settings of transformers' mixtures."""
LABELS = ("labels", "shift_labels")


def targets(inputs: Mapping[str, Tensor]) -> Tensor:
    """The token that each position has to predict, IGNORED where none."""
    if "shift_labels" in inputs:
        return inputs["shift_labels"]
    return F.pad(inputs["labels"][..., 1:], (0, 1), value=IGNORED)


def has_rows(inputs: Mapping[str, Tensor]) -> Tensor:
    """Whether a micro-batch has rows; some only fill a rank's step."""
    return (targets(inputs) != IGNORED).any()


def cross_entropy(logits: Tensor, target_ids: Tensor, smoothing: float = 0.0) -> Tensor:
    """The sum over the positions with a target, computed in float32 for logits of any dtype."""
    return F.cross_entropy(
        logits.float().flatten(0, -2),
        target_ids.flatten(),
        ignore_index=IGNORED,
        label_smoothing=smoothing,
        reduction="sum",
    )


@torch.no_grad()
def right_tokens(logits: Tensor, target_ids: Tensor) -> Tensor:
    """The number of targets whose logit exceeds all others; a target that ties with another token isn't counted.

    `amax` is five times as fast as `argmax`. The target's logit is replaced by -inf meanwhile, because a copy of the
    logits may not fit; `data` keeps autograd from recording that.
    """
    places, others = target_ids.clamp(min=0)[..., None], logits.data
    target_scores = others.gather(-1, places)
    others.scatter_(-1, places, -math.inf)
    highest = others.amax(-1)
    others.scatter_(-1, places, target_scores)
    return ((target_scores[..., 0] > highest) & (target_ids != IGNORED)).sum()


def router_coefficient(model: Any) -> float | None:
    """The weight of a mixture's router loss; None if the model has no such loss, or has it under an unknown name."""
    holders = [*model.modules(), model.config.get_text_config()]
    values = (getattr(holder, name, None) for holder in holders for name in ROUTER_COEFFICIENTS)
    return next((float(value) for value in values if value is not None), None)


def prepare(arguments: dict[str, Any]) -> None:
    """Changes Trainer's arguments: empty rows fill an epoch's last step, and the log doesn't replace NaN by zeros."""
    arguments["args"].logging_nan_inf_filter = False
    for name in ("train_dataset", "eval_dataset"):
        if hasattr(arguments.get(name), "__len__"):
            arguments[name] = batching.RowsAndNone(arguments[name])


class Losses:
    """Computes the loss of each micro-batch so that a step's is the mean over all ranks' tokens.

    A router's loss is the mean over the micro-batches that have rows.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.args = trainer, trainer.args
        self._router = router_coefficient(trainer.model)
        self._routed = self._router_share = torch.tensor(1.0)
        self._scored: Tensor | float = 0.0
        self._compared = False
        smoothing = self.args.label_smoothing_factor
        parallel = getattr(trainer.accelerator, "parallelism_config", None)
        trainer._loss_shifts_labels = True
        if smoothing or not (trainer.model_accepts_loss_kwargs or (parallel and parallel.sp_enabled)):
            trainer.compute_loss_func = partial(self._prediction_loss, smoothing=smoothing)

    # Training

    def begin_step(self, batches: list[Any], device: torch.device) -> None:
        """Counts, for a router, the micro-batches of a step that have rows, on all ranks."""
        if self._router is not None:
            trained = torch.stack([has_rows(batch) for batch in batches]).sum().to(device)
            self._routed = self.trainer.accelerator.reduce(trained, "sum") / self.trainer.get_tp_size()

    def begin_micro_batch(self, inputs: Mapping[str, Tensor]) -> None:
        """Sets the share of this micro-batch's router loss in the step, which is 0 without rows."""
        if self._router is not None:
            self._router_share = self._sharing_ranks() * has_rows(inputs).to(self.args.device) / self._routed

    def compute(
        self, by_trainer: Callable[..., Any], model: nn.Module, inputs: dict[str, Any], tokens: Tensor | int | None
    ) -> tuple[Tensor, Any]:
        """The loss and the model's outputs. `tokens` counts the step's tokens on all ranks, None in an evaluation.

        The model returns a sum, which is divided here: FSDP casts float arguments of a model's forward, and bfloat16
        rounds a count of 271 tokens to 272.
        """
        if self.args.use_liger_kernel:  # Liger's loss never has all logits
            inputs = {**inputs, "return_token_accuracy": True}
        target_ids = targets(inputs)
        loss, outputs = by_trainer(model, inputs, True, None if tokens is None else 1)
        if tokens is not None:
            scale, router = self._rank_scale(), self._router_loss(outputs)
            loss = loss - scale * router
            if model.training and not self._compared:
                loss = self._compare_own_loss(loss, outputs, target_ids, scale)
            loss = loss / torch.as_tensor(tokens).clamp(min=1) + router * self._router_share
        self._score(outputs, target_ids)
        return loss, outputs

    def _sharing_ranks(self) -> int:
        return int(self.trainer.accelerator.num_processes // self.trainer.get_tp_size())

    def _rank_scale(self) -> int:
        """The factor that Trainer applies to each rank's loss, as the engines take the mean over the ranks."""
        return self._sharing_ranks() if self.args.average_tokens_across_devices else 1

    def _router_loss(self, outputs: Any) -> Tensor | float:
        """The part of the model's loss for the balance of its experts."""
        balance = outputs.get("aux_loss")
        if balance is None:
            return 0.0
        if self._router is None:
            raise UserError(
                f"the coefficient of {type(self.trainer.model).__name__}'s router loss is unknown",
                why="that loss can't be separated from the tokens' loss, which is divided by their number",
                fix="output_router_logits: false in the model's config.json",
            )
        weighted: Tensor = self._router * balance.to(self.args.device)
        return weighted

    def _compare_own_loss(self, loss: Tensor, outputs: Any, target_ids: Tensor, scale: int) -> Tensor:
        """Compares the model's own loss on the first batch with the next-token loss, which replaces it if they differ.

        Bart's decoder doesn't shift the labels, and others ignore the number of tokens. Row by row, to spare memory.
        """
        self._compared = True
        if self.trainer.compute_loss_func is not None or outputs.get("logits") is None or "loss" not in outputs:
            return loss
        with torch.no_grad():
            rows = zip(outputs["logits"], target_ids, strict=True)
            of_predictions = torch.stack([cross_entropy(*row) for row in rows]).sum()
        differences = (loss.detach() / scale - of_predictions).abs() > OTHER_LOSS * of_predictions
        if not self.trainer.accelerator.gather(differences[None].to(self.args.device)).any():
            return loss
        if self.args.process_index == 0:
            text = "the model's own loss is not the mean over next tokens; that mean is computed from its predictions"
            console.say(text, style="yellow")
        self.trainer.compute_loss_func = partial(self._prediction_loss, smoothing=0.0)
        return cross_entropy(outputs["logits"], target_ids) * scale

    def _prediction_loss(
        self, outputs: Any, labels: Tensor, num_items_in_batch: Any = None, *, smoothing: float
    ) -> Tensor:
        """The summed next-token loss, for a model that doesn't get the labels."""
        loss = cross_entropy(outputs["logits"], targets({"labels": labels}), smoothing)
        return loss + self._router_loss(outputs)

    # Accuracy

    def _score(self, outputs: Any, target_ids: Tensor) -> None:
        """Counts the correctly predicted tokens of the same pass, if the kernel returns logits or their accuracy."""
        count = (target_ids != IGNORED).sum()
        outputs = outputs if isinstance(outputs, Mapping) else {}
        if outputs.get("logits") is not None:
            correct = right_tokens(outputs["logits"], target_ids)
        elif outputs.get("token_accuracy") is not None:
            correct = outputs["token_accuracy"].detach().nan_to_num() * count
        else:
            return
        self._scored = self._scored + torch.stack([correct.double(), count.double()])

    def take_score(self) -> Tensor | float:
        """Returns the correctly predicted and the scored tokens of this rank since the last call, on its device."""
        score, self._scored = self._scored, 0.0
        return score

    # Held-out rows

    def begin_evaluation(self) -> None:
        self._held_out = torch.zeros(3, dtype=torch.double, device=self.args.device)

    def add_held_out(self, model: nn.Module, inputs: dict[str, Any]) -> None:
        """Adds the losses of this rank's rows; row by row, as a float32 copy of all logits may not fit."""
        inputs = self.trainer._prepare_inputs(inputs)
        context, inputs = self.trainer._prepare_context_parallel_inputs(model, inputs)
        with torch.no_grad(), context():
            target_ids = targets(inputs)
            outputs = model(**{name: part for name, part in inputs.items() if name not in LABELS})
            for logits, row in zip(outputs["logits"], target_ids, strict=True):
                sums = cross_entropy(logits, row), right_tokens(logits, row), (row != IGNORED).sum()
                self._held_out += torch.stack([value.double() for value in sums])

    def held_out(self) -> tuple[float, float]:
        """The mean over the held-out tokens of all ranks, without smoothing or a router's loss, and the accuracy."""
        loss, correct, count = self.trainer.accelerator.reduce(self._held_out, "sum").tolist()
        return loss / count if count else math.nan, correct / max(count, 1)
