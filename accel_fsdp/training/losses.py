"""The losses of a run: what is trained, what is reported of held-out rows, and the stop where they are no numbers.

Trainer's own go wrong in places (transformers 5.23). It shifts the labels for `--label_smoothing_factor` only if it
knows the name of the model's class, which FSDP2 changes; counts one token too many per row of classes that aren't
called ForCausalLM; gives the model that count as a float, which FSDP rounds to the dtype that it computes in; counts
rows twice that fill the last step of an epoch; weighs a router's loss by the number of micro-batches; divides each
rank's held-out loss by the tokens of all and then drops some ranks' part of the last batch; and goes on, with zeros in
the log, after a loss that is not a number.
"""

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from accel_fsdp import console
from accel_fsdp.checkpoints import clean_name, completeness
from accel_fsdp.errors import UsageError, UserError
from accel_fsdp.library_internals import TRAINER, Internal
from accel_fsdp.models import counting
from accel_fsdp.training.checkpointing_trainer import SurvivingTrainer
from accel_fsdp.training.data import IGNORED, batching

RELIES_ON = (
    Internal(f"{TRAINER}.__init__", "* args eval_dataset"),
    Internal(f"{TRAINER}._prepare_for_training", "self max_steps train_dataloader resume_from_checkpoint"),
    Internal(f"{TRAINER}.compute_loss", "self model inputs return_outputs num_items_in_batch"),
    Internal(f"{TRAINER}.floating_point_ops", "self inputs"),
    Internal(f"{TRAINER}.log", "self logs start_time"),
    Internal(f"{TRAINER}.training_step", "self model inputs num_items_in_batch"),
    Internal(f"{TRAINER}._get_grad_norm", "self model grad_norm"),
    Internal(f"{TRAINER}._maybe_log_save_evaluate", "self tr_loss *"),
    Internal(f"{TRAINER}.get_train_dataloader", "self"),
    Internal(f"{TRAINER}.get_eval_dataloader", "self eval_dataset"),
    Internal(f"{TRAINER}._get_num_items_in_batch", "self batch_samples device"),
    Internal(f"{TRAINER}.evaluation_loop", "self dataloader * metric_key_prefix"),
    Internal(f"{TRAINER}.prediction_step", "self model inputs prediction_loss_only ignore_keys"),
    Internal(f"{TRAINER}._prepare_inputs", "self inputs"),
    Internal(f"{TRAINER}._prepare_context_parallel_inputs", "self model inputs"),
    Internal(f"{TRAINER}._get_learning_rate", "self"),
    Internal(f"{TRAINER}._save_checkpoint", "self model trial"),
    Internal(f"{TRAINER}._finalize_training", "self trial num_train_samples start_time"),
    Internal(f"{TRAINER}.get_tp_size", "self"),
)
OTHER_LOSS = 2e-4
"""Of the loss: both are computed in float32, of the same logits, and differ by the order of their sums."""
ROUTER_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")
"""What the layers and settings of transformers' mixtures call the weight of the router's loss."""
SKIPPED_IN_A_ROW = 40
"""Steps that fp16's scaler may leave out, halving its scale each time: from 2 ** 16 it would be nothing by then."""


class Diverged(UserError):
    """A loss, a gradient norm or a weight is NaN or infinite. All ranks raise it, of the same step."""


def targets(inputs: Mapping[str, Tensor]) -> Tensor:
    """The token that each position has to predict, IGNORED where none."""
    if "shift_labels" in inputs:
        return inputs["shift_labels"]
    return F.pad(inputs["labels"][..., 1:], (0, 1), value=IGNORED)


def has_rows(inputs: Mapping[str, Tensor]) -> Tensor:
    """False of a micro-batch that only fills a rank's step."""
    return (targets(inputs) != IGNORED).any()


def cross_entropy(logits: Tensor, wanted: Tensor, smoothing: float = 0.0) -> Tensor:
    """The sum over the positions with a target, computed in float32 whatever dtype the logits have."""
    return F.cross_entropy(
        logits.float().flatten(0, -2),
        wanted.flatten(),
        ignore_index=IGNORED,
        label_smoothing=smoothing,
        reduction="sum",
    )


@torch.no_grad()
def right_tokens(logits: Tensor, wanted: Tensor) -> Tensor:
    """How many targets are likelier than every other token; one that ties with another is not predicted.

    The maximum of the others, without its place: looking for that one would take five times as long. The target's own
    logit gives way to it for that moment, as a copy may not fit; `data`, as autograd is not to take note.
    """
    places, others = wanted.clamp(min=0)[..., None], logits.data
    own = others.gather(-1, places)
    others.scatter_(-1, places, -math.inf)
    highest = others.amax(-1)
    others.scatter_(-1, places, own)
    return ((own[..., 0] > highest) & (wanted != IGNORED)).sum()


def router_coefficient(model: Any) -> float | None:
    """The weight of a mixture's router loss; None where the model has no such loss, or an unknown name for it."""
    holders = [*model.modules(), model.config.get_text_config()]
    found = (getattr(one, name, None) for one in holders for name in ROUTER_COEFFICIENTS)
    return next((float(value) for value in found if value is not None), None)


class LossTrainer(SurvivingTrainer):
    """`Trainer` whose losses are those of a plain loop over all ranks' tokens, and which stops when it diverges."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = kwargs["args"]
        given.logging_nan_inf_filter = False  # it would log zeros
        for name in ("train_dataset", "eval_dataset"):
            if hasattr(kwargs.get(name), "__len__"):
                kwargs[name] = batching.RowsAndNone(kwargs[name])
        super().__init__(*args, **kwargs)
        if given.ignore_nan_inf and self.is_deepspeed_enabled:
            raise UsageError(
                "--ignore_nan_inf under DeepSpeed",
                why="it updates the weights during backward, so no step can be skipped",
                fix="leave it out",
            )
        self._loss_shifts_labels = True
        self._router = router_coefficient(self.model)
        self._routed = self._router_share = torch.tensor(1.0)
        parallel = getattr(self.accelerator, "parallelism_config", None)
        if given.label_smoothing_factor or not (self.model_accepts_loss_kwargs or (parallel and parallel.sp_enabled)):
            self.compute_loss_func = partial(self._own_loss, smoothing=given.label_smoothing_factor)
        self._step_loss: Tensor | float = 0.0
        self._scored: Tensor | float = 0.0
        self._skipped = 0
        self._compared = False
        embedded = self.model.get_input_embeddings()
        counts = counting.weights(self.model)
        self._weights = sum(count for one, count in counts.items() if one is not embedded.weight)

    # Training

    def get_train_dataloader(self) -> Any:
        """Each row of an epoch once: the last step is a mean over the rows that are left, on any number of ranks."""
        return batching.even_out(super().get_train_dataloader())

    def _prepare_for_training(self, max_steps: int, dataloader: Any, checkpoint: str | None) -> Any:
        """Looks at the loaded weights once: what is broken already is no matter of the learning rate.

        Raises:
            UserError: some are NaN or infinite.
        """
        found = super()._prepare_for_training(max_steps, dataloader, checkpoint)
        if odd := self._not_finite():
            weights = checkpoint or self.model.config.get_text_config()._name_or_path or "this one"
            more = f" and {len(odd) - 1} more" if odd[1:] else ""
            raise UserError(
                f"the loaded weights hold NaN or infinite values: {odd[0]}{more}",
                why="training can't repair NaN or infinite weights",
                fix=f"another checkpoint: {weights} is broken",
            )
        return found

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The mean over the tokens of all ranks' micro-batches; a router's loss is a mean over the micro-batches.

        The model returns a sum, which is divided here: FSDP casts the floats that it hands to a model's forward, and
        bfloat16 rounds a count of 271 tokens to 272.
        """
        if self.args.use_liger_kernel:  # its loss never has all logits
            inputs = {**inputs, "return_token_accuracy": True}
        wanted = targets(inputs)
        summed = None if num_items_in_batch is None else 1
        loss, outputs = super().compute_loss(model, inputs, True, summed)
        if num_items_in_batch is not None:
            scale, router = self._rank_scale(), self._router_loss(outputs)
            loss = loss - scale * router
            if model.training and not self._compared:
                loss = self._compare(loss, outputs, wanted, scale)
            loss = loss / torch.as_tensor(num_items_in_batch).clamp(min=1) + router * self._router_share
        self._score(outputs, wanted)
        return (loss, outputs) if return_outputs else loss

    def _router_loss(self, outputs: Any) -> Tensor | float:
        """What the model has added to its loss for the balance of its experts."""
        balance = outputs.get("aux_loss")
        if balance is None:
            return 0.0
        if self._router is None:
            raise UserError(
                f"the coefficient of {type(self.model).__name__}'s router loss is unknown",
                why="that loss can't be told from the tokens' loss, which is divided by their number",
                fix="output_router_logits: false in the model's config.json",
            )
        weighted: Tensor = self._router * balance.to(self.args.device)
        return weighted

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Counts a step's tokens; for a router also the micro-batches that have rows, on all ranks."""
        if self._router is not None:
            trained = torch.stack([has_rows(batch) for batch in batch_samples]).sum().to(device)
            self._routed = self.accelerator.reduce(trained, "sum") / self.get_tp_size()
        return super()._get_num_items_in_batch(batch_samples, device)

    def _compare(self, loss: Tensor, outputs: Any, wanted: Tensor, scale: int) -> Tensor:
        """Compares the model's own loss of the first batch with the next tokens', which replaces it if they differ.

        Bart's decoder doesn't shift the labels, and others ignore the number of tokens. Row by row, to spare memory.
        """
        self._compared = True
        if self.compute_loss_func is not None or outputs.get("logits") is None or "loss" not in outputs:
            return loss
        with torch.no_grad():
            own = torch.stack([cross_entropy(*row) for row in zip(outputs["logits"], wanted, strict=True)]).sum()
        other = (loss.detach() / scale - own).abs() > OTHER_LOSS * own
        if not self.accelerator.gather(other[None].to(self.args.device)).any():
            return loss
        self._say("the model's own loss is not the mean over next tokens; that mean is computed from its predictions")
        self.compute_loss_func = partial(self._own_loss, smoothing=0.0)
        return cross_entropy(outputs["logits"], wanted) * scale

    def _rank_scale(self) -> int:
        """What Trainer multiplies each rank's loss by, in place: the engines take the mean over the ranks."""
        return self.accelerator.num_processes // self.get_tp_size() if self.args.average_tokens_across_devices else 1

    def floating_point_ops(self, inputs: Mapping[str, Tensor]) -> int:
        """Six per weight and token, of the whole model; transformers would count its parameters at each batch."""
        return 6 * inputs["input_ids"].numel() * self._weights

    def _score(self, outputs: Any, wanted: Tensor) -> None:
        """Counts the tokens that were predicted right, from the same pass; not where a kernel keeps the logits."""
        count = (wanted != IGNORED).sum()
        found = outputs if isinstance(outputs, Mapping) else {}
        if found.get("logits") is not None:
            right = right_tokens(found["logits"], wanted)
        elif found.get("token_accuracy") is not None:
            right = found["token_accuracy"].detach().nan_to_num() * count
        else:
            return
        self._scored = self._scored + torch.stack([right.double(), count.double()])

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs the share of tokens predicted right beside the loss, under TRL's name. Call on all ranks."""
        if "loss" in logs and isinstance(self._scored, Tensor):
            right, count = self.accelerator.reduce(self._scored, "sum").tolist()
            logs["mean_token_accuracy"] = right / max(count, 1)
            self._scored = 0.0
        super().log(logs, start_time)

    def _own_loss(self, outputs: Any, labels: Tensor, num_items_in_batch: Any = None, *, smoothing: float) -> Tensor:
        """The next tokens' loss of a model that isn't given the labels, summed."""
        loss = cross_entropy(outputs["logits"], targets({"labels": labels}), smoothing)
        return loss + self._router_loss(outputs)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Trains on one micro-batch. Its router's loss is one of those that have rows."""
        if self._router is not None:
            ranks = self.accelerator.num_processes // self.get_tp_size()
            self._router_share = ranks * has_rows(inputs).to(self.args.device) / self._routed
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        self._step_loss = self._step_loss + loss
        return loss

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """The last moment before the optimizer's step; all ranks' gradients are there."""
        norm = super()._get_grad_norm(model, grad_norm)
        self._check_step(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        return norm

    def _check_step(self, norm: Tensor | float | None) -> None:
        """Looks at the step's loss and gradient norm, on all ranks alike; the one time per step that the host waits.

        Not on TPU, whose steps are compiled ahead: there the weights are looked at, before each save and at the end.

        Raises:
            Diverged: one of them is NaN or infinite.
        """
        if self._on_tpu:
            return
        seen = (self._step_loss, 0.0 if norm is None else norm)
        self._step_loss = 0.0
        own = torch.stack([torch.as_tensor(one, dtype=torch.float32, device=self.args.device) for one in seen])
        loss, length = self.accelerator.gather(own[None]).mean(0).tolist()
        if math.isfinite(loss) and math.isfinite(length):
            self._skipped = 0
            return
        self._skipped += 1
        if math.isfinite(loss) and self._scales_gradients() and self._skipped < SKIPPED_IN_A_ROW:
            return  # the scaler leaves this step out and tries a smaller scale
        found = f"in step {self.state.global_step + 1} the loss is {loss:.4g}, the gradient norm {length:.4g}"
        if not self.args.ignore_nan_inf:
            self.state.global_step += 1  # the line is of this step, which is never done
            self.log({"loss": loss, "grad_norm": length, "learning_rate": self._get_learning_rate()})
            self.state.global_step -= 1
            raise self._diverged(found)
        self._say(f"{found}; its update is left out")
        if not self._scales_gradients():
            for parameter in self.model.parameters():
                parameter.grad = None

    def _scales_gradients(self) -> bool:
        return bool(self.accelerator.mixed_precision == "fp16")

    def _maybe_log_save_evaluate(self, tr_loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Trainer sets the sum of losses back by subtracting it from itself, and NaN stays."""
        super()._maybe_log_save_evaluate(tr_loss, *args, **kwargs)
        if self._globalstep_last_logged == self.state.global_step:
            tr_loss.zero_()

    # Held-out rows

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """All held-out rows, each once."""
        return batching.even_out(super().get_eval_dataloader(eval_dataset), keep_last=True)

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """The mean over the held-out tokens of all ranks: no smoothing, no router's loss, no row twice.

        Raises:
            Diverged: it is NaN or infinite.
        """
        self._held_out = torch.zeros(3, dtype=torch.double, device=self.args.device)
        output = super().evaluation_loop(dataloader, *args, **kwargs)
        loss, right, count = self.accelerator.reduce(self._held_out, "sum").tolist()
        mean = loss / count if count else math.nan
        if not math.isfinite(mean) and not self.args.ignore_nan_inf:
            raise self._diverged(f"after step {self.state.global_step} the held-out loss is {mean:.4g}")
        prefix = kwargs.get("metric_key_prefix", "eval")
        output.metrics[f"{prefix}_loss"] = mean
        output.metrics[f"{prefix}_mean_token_accuracy"] = right / max(count, 1)
        return output

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[None, None, None]:
        """Adds what this rank's rows lose; row by row, as a float32 copy of all logits may not fit."""
        inputs = self._prepare_inputs(inputs)
        context, inputs = self._prepare_context_parallel_inputs(model, inputs)
        with torch.no_grad(), context():
            wanted = targets(inputs)
            outputs = model(**{name: part for name, part in inputs.items() if name not in ("labels", "shift_labels")})
            for logits, row in zip(outputs["logits"], wanted, strict=True):
                lost, right, count = cross_entropy(logits, row), right_tokens(logits, row), (row != IGNORED).sum()
                self._held_out += torch.stack([lost.double(), right.double(), count.double()])
        return None, None, None

    # What isn't kept

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Saves finite weights only, so that the last checkpoint is always one to go on from.

        Raises:
            Diverged: they aren't.
        """
        if not self._not_finite():
            super()._save_checkpoint(model, trial)
            return
        found = f"after step {self.state.global_step} the weights hold NaN or infinite values"
        if not self.args.ignore_nan_inf:
            raise self._diverged(found)
        self._say(f"{found}: no checkpoint is written")

    def _finalize_training(self, trial: Any, num_train_samples: float, start_time: float) -> Any:
        """Ends with finite weights only; those of the best checkpoint are, whatever came after it.

        Trainer's rate counts every step as a whole one, as a share of `num_train_samples`.

        Raises:
            Diverged: they aren't.
        """
        if not (self.stop.agreed or self.args.ignore_nan_inf):
            self._check_weights()
        first, last = (self._rows_before(step) for step in (self._initial_global_step, self.state.global_step))
        share = (self.state.global_step - self._initial_global_step) / max(self.state.max_steps, 1)
        found = super()._finalize_training(trial, (last - first) / share if share else 0, start_time)
        self._check_weights()
        return found

    def _rows_before(self, step: int) -> int:
        """The rows that were trained when that many steps were done."""
        size: int = self.get_total_train_batch_size(self.args)
        if not hasattr(self.train_dataset, "__len__"):
            return step * size
        rows = len(self.train_dataset)
        if self.args.dataloader_drop_last:
            rows -= rows % (size // self.args.gradient_accumulation_steps)
        epochs, steps = divmod(step, max(-(-rows // size), 1))
        return epochs * rows + min(steps * size, rows)

    def _check_weights(self) -> None:
        if self._not_finite():
            raise self._diverged(f"after step {self.state.global_step} the weights hold NaN or infinite values")

    def _not_finite(self) -> list[str]:
        """The names of trained parameters that hold NaN or infinity, on whichever rank their parts lie."""
        trained = self._trained()
        flags = torch.zeros(len(trained), dtype=torch.bool, device=self.args.device)
        for place, part in enumerate(map(_local, trained.values())):
            if part.numel():
                flags[place] = ~torch.stack(torch.aminmax(part)).float().isfinite().all()
        odd = self.accelerator.gather(flags[None]).any(0).tolist()
        return [name for name, is_odd in zip(trained, odd, strict=True) if is_odd]

    def _trained(self) -> dict[str, nn.Parameter]:
        named = self.model.named_parameters()
        return {clean_name(name): one for name, one in named if one.requires_grad and one.is_floating_point()}

    def _diverged(self, found: str) -> Diverged:
        newest = completeness.choose(Path(self.args.output_dir)).newest
        rate = f"a lower --learning_rate than {self.args.learning_rate:g}, more --warmup_steps"
        clip = "" if 0 < self.args.max_grad_norm <= 1 else ", --max_grad_norm 1"
        precision = ", mixed_precision: bf16 in the YAML" if self._scales_gradients() else ""
        resume = f"; --resume_from_checkpoint true goes on from {newest.name}" if newest else ""
        leave_out = "" if self.args.ignore_nan_inf else "; or --ignore_nan_inf true to leave such steps out"
        return Diverged(
            f"training diverged: {found}",
            why=f"every later step would be NaN too; the last finite weights are in {newest}"
            if newest
            else "every later step would be NaN too; no checkpoint was written before",
            fix=f"{rate}{clip}{precision}{resume}{leave_out}",
        )

    def _say(self, text: str) -> None:
        if self.args.process_index == 0:
            console.say(text, style="yellow")


@torch.no_grad()
def _local(parameter: Any) -> Tensor:
    """The part of a parameter that lies on this rank; under ZeRO-3 it hides in an attribute."""
    part: Tensor = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    part = getattr(part, "ds_tensor", part)
    return part.detach()
