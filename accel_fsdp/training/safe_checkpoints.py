"""How a Trainer writes and loads checkpoints: whole or not at all, on any number of ranks, and when a job must end."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_fsdp.errors import Stopped
from accel_fsdp.launch_environment import LaunchEnvironment
from accel_fsdp.library_internals import TRAINER, Internal
from accel_fsdp.training import loading, mesh_checkpoints, resuming
from accel_fsdp.training.hang_watch import HangWatch
from accel_fsdp.training.preemption import Stop
from accel_fsdp.training.saving import CheckpointWriter

if TYPE_CHECKING:
    from transformers import Trainer as Base
else:
    Base = object

RELIES_ON = (
    Internal(f"{TRAINER}._prepare_for_training", "self max_steps train_dataloader resume_from_checkpoint"),
    Internal(f"{TRAINER}._load_from_checkpoint", "self resume_from_checkpoint model"),
    Internal(f"{TRAINER}._load_best_model", "self"),
    Internal(f"{TRAINER}._load_optimizer_and_scheduler", "self checkpoint"),
    Internal(f"{TRAINER}._load_rng_state", "self checkpoint"),
    Internal(f"{TRAINER}._get_output_dir", "self trial"),
    Internal(f"{TRAINER}._save_checkpoint", "self model trial"),
    Internal(f"{TRAINER}._save_optimizer_and_scheduler", "self output_dir"),
    Internal(f"{TRAINER}.save_model", "self output_dir _internal_call"),
)


class SafeCheckpoints(Base):  # type: ignore[misc]
    """Comes before `Trainer`, or a subclass of it, in the bases of a class."""

    stop: Stop
    watch: HangWatch
    checkpoints: CheckpointWriter

    @property
    def by_transformers(self) -> bool:
        """Whether transformers has sharded the model while it was loaded."""
        return LaunchEnvironment.now().by_transformers

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP shards the model, through Accelerate or transformers."""
        return bool(self.is_fsdp_enabled or self.by_transformers)

    def end_of_checkpoints(self) -> None:
        """Waits until the last checkpoint is complete.

        Raises:
            Stopped: a signal has ended the training.
        """
        with self.watch.doing("a save"):
            self.checkpoints.wait()
        if self.stop.agreed:
            left = self.checkpoints.upload_rest()
            raise Stopped(
                f"{self.stop.agreed} after step {self.state.global_step}",
                why=f"saved: {self.checkpoints.folder()}" + (f"; not uploaded: {left}" if left else ""),
                fix="the same command with --resume_from_checkpoint true",
            )

    def _prepare_for_training(self, max_steps: int, dataloader: Any, checkpoint: str | None) -> Any:
        with loading.as_data(self.is_deepspeed_enabled):
            return super()._prepare_for_training(max_steps, dataloader, checkpoint)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if hasattr(self.model, "peft_config") and not self.is_deepspeed_enabled:
            trained = [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]
            resuming.check_adapter(Path(resume_from_checkpoint), trained)
        load = super()._load_from_checkpoint
        loading.weights(self, resume_from_checkpoint, lambda: load(resume_from_checkpoint, model=model))

    def _load_best_model(self) -> None:
        loading.weights(self, self.state.best_model_checkpoint, super()._load_best_model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        load = super()._load_optimizer_and_scheduler
        loading.optimizer_and_schedule(self, checkpoint, lambda: load(checkpoint))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.by_transformers:
            mesh_checkpoints.save_optimizer(self, Path(output_dir))
        else:
            super()._save_optimizer_and_scheduler(output_dir)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        loading.random_state(self, checkpoint, super()._load_rng_state)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        write = super()._save_checkpoint
        with self.watch.doing("a save"):
            self.checkpoints.save(trial, lambda: write(model, trial))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves as `Trainer` does; for a checkpoint, creates the folder on every rank first.

        With sharded state dicts, the folder would otherwise appear after each rank has looked for the best checkpoint
        (transformers 5.23, `_save_checkpoint`): a rank that misses the newest one doesn't record it as the best, and
        ranks that differ hang in `load_best_model_at_end`.
        """
        if _internal_call and output_dir is not None:
            Path(output_dir).mkdir(parents=True, exist_ok=True)
            if self.by_transformers:
                mesh_checkpoints.save_weights(self.model, Path(output_dir))
                return
        super().save_model(output_dir, _internal_call)
