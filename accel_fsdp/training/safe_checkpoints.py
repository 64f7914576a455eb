"""How a Trainer writes and loads checkpoints: whole or not at all, on any number of ranks, and when a job must end."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_fsdp.errors import Stopped
from accel_fsdp.launch_environment import LaunchEnvironment
from accel_fsdp.library_internals import TRAINER, Internal
from accel_fsdp.training import loading, mesh_checkpoints, resuming
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
    """Comes before `Trainer`, or a subclass of it, in the bases of a class.

    Replaced methods of Trainer, in the order in which a run calls them; each calls Trainer's own, but for
    saves on a mesh and the best model after a signal:

    | method | why (transformers 5.23) |
    |---|---|
    | `_prepare_for_training` | torch and DeepSpeed run code that a checkpoint's pickles name (DeepSpeed#6094) |
    | `_load_from_checkpoint`, `_load_best_model` | parts are left out: `loading.weights` says which (no report yet) |
    | `_load_optimizer_and_scheduler` | Adam restarts from zero under FSDP1 (transformers#25849, accelerate#3971) |
    | `_load_rng_state` | more ranks than before repeat the numbers of step 0 (transformers#14994 skips them) |
    | `_save_checkpoint` | a half-written folder is resumed, and its end fails (transformers#35782) |
    | `_save_optimizer_and_scheduler`, `save_model` | saves hang on a mesh (#48569), or of the best (#37025) |

    A checkpoint is complete when its marker, `complete.json`, says so, which is written last: after every file of every
    rank. On SIGTERM, SIGUSR1 or Ctrl-C all ranks agree on a step (`preemption.Stop`), save after it and leave Trainer's
    loop; then `train` raises `Stopped`, with which the process ends with code 75.
    """

    stop: Stop
    checkpoints: CheckpointWriter
    resumed: str | None = None
    """The checkpoint that this run resumes."""

    @property
    def by_transformers(self) -> bool:
        """Whether transformers has sharded the model while it was loaded."""
        return LaunchEnvironment.now().by_transformers

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP shards the model, through Accelerate or transformers."""
        return bool(self.is_fsdp_enabled or self.by_transformers)

    def train(self, resume_from_checkpoint: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Trains as `Trainer` does, and waits until the last checkpoint is complete.

        Raises:
            Stopped: a signal has ended the training.
        """
        self.resumed = resume_from_checkpoint
        result = super().train(resume_from_checkpoint, *args, **kwargs)
        self.checkpoints.wait()
        if self.stop.signal and not self.stop.agreed:
            self.checkpoints.log("the signal came in the last step: the run ends by itself")
        if self.stop.agreed:
            left, folder = self.checkpoints.upload_rest(), self.checkpoints.folder()
            saved = f"saved: {folder}" if folder.is_dir() else "not saved: the weights hold NaN or infinity"
            raise Stopped(
                f"{self.stop.agreed} after step {self.state.global_step}",
                why=saved + (f"; not uploaded: {left}" if left else ""),
                fix="the same command with --resume_from_checkpoint true",
            )
        return result

    # Loading

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
        """Loads the best checkpoint once it is complete; not after a signal, when time is short."""
        if self.stop.agreed:
            return
        self.checkpoints.wait()
        loading.weights(self, self.state.best_model_checkpoint, super()._load_best_model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        load = super()._load_optimizer_and_scheduler
        loading.optimizer_and_schedule(self, checkpoint, lambda: load(checkpoint))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        loading.random_state(self, checkpoint, super()._load_rng_state)

    # Saving

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        write = super()._save_checkpoint
        self.checkpoints.save(trial, lambda: write(model, trial))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.by_transformers:
            mesh_checkpoints.save_optimizer(self, Path(output_dir))
        else:
            super()._save_optimizer_and_scheduler(output_dir)

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
