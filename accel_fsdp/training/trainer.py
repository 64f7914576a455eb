"""The Trainer of `train/sft.py`, which checks sharding, writes safe checkpoints and exports."""

import math
import weakref
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor
from transformers import EarlyStoppingCallback, Trainer

from accel_fsdp import atomic_files, console, library_internals, models
from accel_fsdp.checkpoints import clean_name, file_names
from accel_fsdp.errors import Stopped, UserError, first_line
from accel_fsdp.exporter import companion_files
from accel_fsdp.job import from_run
from accel_fsdp.library_internals import TRAINER, Internal
from accel_fsdp.models import counting
from accel_fsdp.ranks import holding as holdings
from accel_fsdp.training import (
    background_saves,
    disk_room,
    export,
    load_model,
    loading,
    losses,
    mesh,
    mesh_checkpoints,
    preemption,
    preflight,
    resuming,
    safe_checkpoints,
    saving,
    sharding_check,
)
from accel_fsdp.training.arguments import SEE_HELP
from accel_fsdp.training.data import batching
from accel_fsdp.training.divergence import FiniteCheck
from accel_fsdp.training.hang_timeout import HangTimeout
from accel_fsdp.training.losses import Losses
from accel_fsdp.training.preemption import Stop
from accel_fsdp.training.reporting import History, profiling, progress
from accel_fsdp.training.safe_checkpoints import SafeCheckpoints
from accel_fsdp.training.saving import CheckpointWriter

RELIES_ON = (
    Internal(f"{TRAINER}.__init__", "* args eval_dataset"),
    Internal(f"{TRAINER}.train", "self resume_from_checkpoint *"),
    Internal(f"{TRAINER}._run_epoch"),
    Internal(f"{TRAINER}.get_decay_parameter_names", "self model"),
    Internal(f"{TRAINER}.get_train_dataloader", "self"),
    Internal(f"{TRAINER}.get_eval_dataloader", "self eval_dataset"),
    Internal(f"{TRAINER}.get_batch_samples", "self epoch_iterator num_batches device"),
    Internal(f"{TRAINER}.training_step", "self model inputs num_items_in_batch"),
    Internal(f"{TRAINER}.compute_loss", "self model inputs return_outputs num_items_in_batch"),
    Internal(f"{TRAINER}._get_grad_norm", "self model grad_norm"),
    Internal(f"{TRAINER}._maybe_log_save_evaluate", "self tr_loss *"),
    Internal(f"{TRAINER}.log", "self logs start_time"),
    Internal(f"{TRAINER}.evaluation_loop", "self dataloader * metric_key_prefix"),
    Internal(f"{TRAINER}.prediction_step", "self model inputs prediction_loss_only ignore_keys"),
    Internal(f"{TRAINER}._prepare_inputs", "self inputs"),
    Internal(f"{TRAINER}._prepare_context_parallel_inputs", "self model inputs"),
    Internal(f"{TRAINER}._get_learning_rate", "self"),
    Internal(f"{TRAINER}.get_tp_size", "self"),
    Internal(f"{TRAINER}._save", "self output_dir state_dict"),
)
GROUPING = ("group_by_length", "batch_rebalance")


def check_libraries() -> None:
    """Raises a UserError unless the internals that this Trainer overrides or calls exist.

    An override that is never called fails silently.
    """
    modules = (
        *(background_saves, load_model, loading, mesh_checkpoints, preemption, safe_checkpoints),
        *(export, holdings, profiling),
    )
    used = (*RELIES_ON, *(internal for module in modules for internal in module.RELIES_ON))
    library_internals.check(*used, why="losses, checkpoints and the sharding check depend on it")


class SftTrainer(SafeCheckpoints, Trainer):  # type: ignore[misc]
    """`Trainer` that refuses unsharded training, writes complete checkpoints, and exports a verified folder.

    Its methods only decide when something happens. The work is in `losses`, `divergence`, `loading`, `saving`,
    `export`, and in callbacks. `SafeCheckpoints` lists the methods about checkpoints. Further private ones of Trainer:

    | method | why (transformers 5.23) |
    |---|---|
    | `_run_epoch` | a finished run that is resumed takes one more step (no report yet) |
    | `_get_grad_norm` | Trainer trains on when the norm is NaN (trl#6702); the last call before the update |
    | `_maybe_log_save_evaluate` | one NaN loss makes all later ones NaN in the log (transformers#13619) |
    | `_save_checkpoint` | Trainer saves weights that are NaN, and deletes the last finite ones (trl#6702) |
    | `_save` | Trainer doesn't cast to the export's dtype; on a mesh only one rank gathers, which hangs (#48569) |

    The data loaders, `get_batch_samples`, `training_step`, `compute_loss`, `evaluation_loop` and `prediction_step` make
    the losses those of a plain loop: `losses` lists Trainer's faults.
    """

    def __init__(self, *args: Any, history: History | None = None, **kwargs: Any) -> None:
        model, training = kwargs["model"], kwargs["args"]
        output = Path(training.output_dir)
        self.use_cache = getattr(model.config, "use_cache", None)
        counts = counting.weights(model)
        parameters = sum(count for p, count in counts.items() if p.requires_grad), sum(counts.values())
        self.beside_text = models.beside_text(model)
        preflight.before_trainer(model, training)
        if training.process_index == 0:
            self.lock = atomic_files.only_run(output)
            companion_files.describe(model, kwargs.get("processing_class"), output / file_names.DESCRIBED)
        losses.prepare(kwargs)
        try:
            with mesh_checkpoints.past_constructor(training):
                super().__init__(*args, **kwargs)
        except (ValueError, ImportError) as error:
            raise UserError(
                f"Trainer refuses this combination: {first_line(error)}",
                why="training can't start",
                fix=SEE_HELP,
            ) from error
        run = weakref.proxy(self)  # a cycle of references would keep the folder's lock after the trainer failed
        self.finite, self.losses = FiniteCheck(run), Losses(run)
        self.stop, self.hang_timeout = Stop(), HangTimeout(training.hang_timeout)
        self.checkpoints = CheckpointWriter(run, history or History({}))
        packed = getattr(self.data_collator, "packed", False)
        job = from_run.job_of(model, self.args, self.accelerator, packed)
        self.report = progress.ProgressReport(job, self.accelerator, parameters)
        self._add_callbacks()
        self.exporter = export.Export(run)

    def _add_callbacks(self) -> None:
        self.add_callback(self.stop)
        self.add_callback(self.hang_timeout)
        self.add_callback(self.checkpoints)
        self.add_callback(self.finite)
        self.report.replace_printers(self)
        if self.args.profile_steps:
            self.add_callback(profiling.StepProfiler(self.args, self.report.tally))
        if self.args.early_stopping_patience is not None:
            self.add_callback(EarlyStoppingCallback(self.args.early_stopping_patience))
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if plugin is not None:
            preflight.keep_precision(plugin)
            self.add_callback(sharding_check.ShardingCheck())
        elif self.by_transformers:
            mesh.announce(self.model, self.args)
            self.add_callback(mesh.GradientCheck())
        elif self.accelerator.is_main_process:
            kind = self.accelerator.distributed_type.value
            single = "one process, which holds the whole model"
            multiple = f"{kind}: the YAML doesn't select FSDP; each rank may hold the whole model"
            console.say(multiple if self.args.world_size > 1 else single, style="yellow")
        if self.data_collator.packed:  # after the sharding check: a forward pass leaves FSDP's root unit gathered
            self.add_callback(batching.IsolationCheck(self.data_collator))

    # Training, from start to end

    def train(self, resume_from_checkpoint: str | None = None, **kwargs: Any) -> Any:
        """Trains, from `resume_from_checkpoint` if given.

        Raises:
            UserError: the checkpoint doesn't fit the settings of this run, the disk is too small, or a rank is lost.
            Stopped: SIGTERM, SIGUSR1 or Ctrl-C arrived, and a checkpoint to resume from was saved.
        """
        if resume_from_checkpoint is not None:
            grouping = str(self.args.train_sampling_strategy) in GROUPING
            origin, skips_data = self.checkpoints.origin(), not self.args.ignore_data_skip
            resuming.check(Path(resume_from_checkpoint), origin, grouping, skips_data)
        try:
            disk_room.check_shared(self, resume_from_checkpoint)
            with self.report.explains_out_of_memory():
                result = super().train(resume_from_checkpoint, **kwargs)
            self.finite.check_weights()
            return result
        except Stopped:
            self.stop.leave_ignored()
            raise
        except BaseException as error:
            if self.args.local_process_index != 0:
                self.stop.end_by_signal()  # local rank 0 prints the error
            if isinstance(error, (RuntimeError, CheckpointException)) and saving.lost_a_rank(error):
                self.checkpoints.stop_for_lost_rank(error)
            raise
        finally:
            self.hang_timeout.stop()
            self.checkpoints.complete_last()
            self.stop.release()

    def _run_epoch(self, **kwargs: Any) -> None:
        """Skips the extra step that Trainer takes when it resumes a finished run (transformers 5.23)."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(**kwargs)

    def get_decay_parameter_names(self, model: torch.nn.Module) -> list[str]:
        """The parameters with weight decay, without those that text doesn't use: FSDP1 gives these zero gradients."""
        names: list[str] = super().get_decay_parameter_names(model)
        return [name for name in names if clean_name(name) not in self.beside_text]

    # A step

    def get_train_dataloader(self) -> Any:
        """Yields each row of an epoch once: the last step takes the mean over the remaining rows of all ranks."""
        return batching.even_out(super().get_train_dataloader())

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        """Takes the micro-batches of a step, and counts what the loss is divided by."""
        samples, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self.losses.begin_step(samples, device)
        return samples, items

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Trains on one micro-batch, and counts its tokens."""
        self.report.tally.count(inputs)
        self.losses.begin_micro_batch(inputs)
        loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        self.finite.step_loss = self.finite.step_loss + loss
        return loss

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The mean over the tokens of all ranks' micro-batches."""
        loss, outputs = self.losses.compute(super().compute_loss, model, inputs, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Checks the gradient norm, in the last call before the optimizer's step."""
        norm = super()._get_grad_norm(model, grad_norm)
        self.finite.check_step(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        return norm

    def _maybe_log_save_evaluate(self, tr_loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        super()._maybe_log_save_evaluate(tr_loss, *args, **kwargs)
        if self._globalstep_last_logged == self.state.global_step:
            tr_loss.zero_()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs as `Trainer` does, and adds rate, memory and accuracy. Call on all ranks."""
        if "loss" in logs:
            self.report.add_metrics(logs, self.losses.take_score())
        super().log(logs, start_time)

    # Held-out rows

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Yields each held-out row once."""
        return batching.even_out(super().get_eval_dataloader(eval_dataset), keep_last=True)

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """The mean loss over the held-out tokens of all ranks: without smoothing, router loss or repeated rows.

        Raises:
            Diverged: the mean is NaN or infinite.
        """
        self.losses.begin_evaluation()
        output = super().evaluation_loop(dataloader, *args, **kwargs)
        mean, accuracy = self.losses.held_out()
        if not math.isfinite(mean) and not self.args.ignore_nan_inf:
            raise self.finite.diverged(f"after step {self.state.global_step} the held-out loss is {mean:.4g}")
        prefix = kwargs.get("metric_key_prefix", "eval")
        output.metrics.update({f"{prefix}_loss": mean, f"{prefix}_mean_token_accuracy": accuracy})
        return output

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[None, None, None]:
        """Adds the loss of a batch of held-out rows; keeps no predictions."""
        self.losses.add_held_out(model, inputs)
        return None, None, None

    # Checkpoints

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.finite.may_save():
            super()._save_checkpoint(model, trial)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        with mesh_checkpoints.gathered(self, state_dict) as whole:
            if self.args.should_save or not self.by_transformers:
                super()._save(output_dir, state_dict=self.exporter.as_exported(whole))

    def export(self, target: Path, card: str = "") -> int:
        """Gathers the full model (or adapter) and writes it to `target`; returns the number of tensors written.

        Call on all ranks. `target` appears complete and verified, with `card` as its README.md, or not at all.
        """
        return self.exporter.write(target, card)
