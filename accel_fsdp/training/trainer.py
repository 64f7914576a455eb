"""What `train/sft.py` is made of: a Trainer that checks its sharding, keeps its checkpoints and exports."""

import logging
import warnings
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from transformers import (
    EarlyStoppingCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)

from accel_fsdp import atomic_files, console, cpu, disks, library_internals
from accel_fsdp.checkpoints import clean_name, completeness, file_names
from accel_fsdp.errors import UserError
from accel_fsdp.exporter import companion_files, exported_folder
from accel_fsdp.job import from_run
from accel_fsdp.launch.ranks import holding as holdings
from accel_fsdp.launch_environment import LaunchEnvironment
from accel_fsdp.library_internals import TRAINER, Internal
from accel_fsdp.models import counting, inspect_model
from accel_fsdp.training import (
    beats,
    checkpointing_trainer,
    gather,
    load_model,
    losses,
    preemption,
    preflight,
    resuming_trainer,
    sharding_check,
)
from accel_fsdp.training.arguments import SEE_HELP
from accel_fsdp.training.losses import LossTrainer
from accel_fsdp.training.reporting import profile_flag, profiling, progress
from accel_fsdp.units import counted

RELIES_ON = (
    Internal(f"{TRAINER}._init_training_state", "self max_steps num_update_steps_per_epoch *"),
    Internal(f"{TRAINER}.get_decay_parameter_names", "self model"),
    Internal(f"{TRAINER}.training_step", "self model inputs num_items_in_batch"),
    Internal(f"{TRAINER}.log", "self logs start_time"),
    Internal(f"{TRAINER}.save_model", "self output_dir _internal_call"),
    Internal(f"{TRAINER}._save", "self output_dir state_dict"),
)


def check_libraries() -> None:
    """Stops where what this Trainer overrides or calls isn't there; early, as a method that nobody calls says nothing.

    Raises:
        UserError: transformers, torch or accelerate have changed inside.
    """
    modules = (checkpointing_trainer, resuming_trainer, losses, preemption, beats, gather, holdings, profiling)
    used = (*RELIES_ON, *(one for module in modules for one in module.RELIES_ON))
    library_internals.check(*used, why="losses, checkpoints and the check of the sharding rest on it")


class SftTrainer(LossTrainer):
    """`Trainer` that refuses unsharded training, keeps its checkpoints whole, and exports a verified folder."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_libraries()
        model = kwargs["model"]
        self.revision = getattr(model.config, "_commit_hash", None) or "main"
        self.use_cache = getattr(model.config, "use_cache", None)
        counts = counting.weights(model)
        trained = sum(count for one, count in counts.items() if one.requires_grad)
        self.parameters = trained, sum(counts.values())
        self.beside_text = inspect_model.beside_text(model)
        preflight.before_trainer(model, kwargs["args"])
        layers = profiling.layers_of(model) if kwargs["args"].profile_steps else []
        if kwargs["args"].process_index == 0:
            self.lock = atomic_files.only_run(Path(kwargs["args"].output_dir))
            companion_files.describe(
                model, kwargs.get("processing_class"), Path(kwargs["args"].output_dir) / file_names.DESCRIBED
            )
        try:
            super().__init__(*args, **kwargs)
        except (ValueError, ImportError) as error:
            raise UserError(
                f"Trainer refuses this combination: {inspect_model.first_line(error)}",
                why="training can't start",
                fix=SEE_HELP,
            ) from error
        job = from_run.job_of(model, self.args, self.accelerator)
        self.report = progress.ProgressReport(job, self.accelerator)
        self.report.replace_printers(self)
        self.profiler: profiling.StepProfiler | None = None
        if self.args.profile_steps:
            steps = profile_flag.steps_asked(self.args.profile_steps)
            reporter = profiling.Reporter(self.report, Path(self.args.output_dir), layers, model)
            self.profiler = profiling.StepProfiler(
                steps, layers, self.args, lambda: self.model_wrapped, self.watch.doing, reporter
            )
            self.add_callback(self.profiler)
        if self.args.early_stopping_patience is not None:
            self.add_callback(EarlyStoppingCallback(self.args.early_stopping_patience))
        self.add_callback(preflight.HostMemory())
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if plugin is not None:
            preflight.keep_precision(plugin)
            self.add_callback(ShardingCheck())
        elif self.accelerator.is_main_process:
            kind = self.accelerator.distributed_type.value
            alone = "one process, which holds the whole model"
            several = f"{kind}: no FSDP was asked for; each rank may hold the whole model"
            console.say(several if self.args.world_size > 1 else alone, style="yellow")
        self.export_dtype = self._export_dtype(model)
        saved_as = getattr(torch, self.export_dtype) if self.export_dtype else None
        self.expected = exported_folder.expected_tensors(model, self._trained_as(), saved_as)
        self.exporting = False

    def get_decay_parameter_names(self, model: torch.nn.Module) -> list[str]:
        """The parameters that decay: none that text doesn't reach, to which FSDP1 gives gradients of zeros."""
        names: list[str] = super().get_decay_parameter_names(model)
        return [name for name in names if clean_name(name) not in self.beside_text]

    def _export_dtype(self, model: Any) -> str:
        """The name of the dtype to export in; empty: as trained, which is the default of an adapter."""
        if self.args.export_dtype != "auto":
            return str(self.args.export_dtype)
        if hasattr(model, "peft_config"):
            return ""
        return inspect_model.stored_dtype(model.config._name_or_path, self.revision, model.config.is_remote_code())

    def _trained_as(self) -> torch.dtype | None:
        """Mixed precision: FSDP trains float32 master weights, DeepSpeed a 16-bit model beside its own."""
        precision = self.accelerator.mixed_precision
        if getattr(self.accelerator.state, "deepspeed_plugin", None) is not None:
            return load_model.COMPUTED.get(precision)
        fsdp = getattr(self.accelerator.state, "fsdp_plugin", None) is not None
        return torch.float32 if fsdp and precision != "no" else None

    def _init_training_state(self, max_steps: int, steps_per_epoch: int, *args: Any) -> Any:
        if self.args.logs_often:  # before Trainer compares it with a checkpoint's
            self.args.logging_steps = progress.logging_steps(max_steps)
        found = super()._init_training_state(max_steps, steps_per_epoch, *args)
        if self.args.logs_often:
            self.state.logging_steps = self.args.logging_steps
        if self.args.process_index == 0:
            batch = (self.args.per_device_train_batch_size, self.args.gradient_accumulation_steps, self.args.world_size)
            steps = (steps_per_epoch, self.state.global_step, max_steps)
            for line in progress.beginning(*self.parameters, batch, steps):
                console.say(line, style="cyan")
        return found

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Trains on one micro-batch, and counts it."""
        self.report.tally.count(inputs)
        if self.profiler is not None:
            self.profiler.micro_batch(inputs)
        loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        if self.profiler is not None and self.accelerator.sync_gradients:
            self.profiler.backward_ended()
        return loss

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """The loss of `LossTrainer`."""
        found = super().compute_loss(*args, **kwargs)
        if self.profiler is not None:
            self.profiler.forward_ended()
        return found

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs as `Trainer` does, with rate and memory beside the loss."""
        self.report.add_metrics(logs)
        super().log(logs, start_time)

    def _explaining(self) -> AbstractContextManager[None]:
        """Turns an out-of-memory error into what the plan says would free some."""
        return self.report.explains_out_of_memory()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves as `Trainer` does; of a checkpoint, makes the folder on every rank first.

        With sharded state dicts nothing else makes it until each rank has looked whether the best checkpoint is there
        (transformers 5.23, `_save_checkpoint`): the best one isn't noted where it is the newest, and ranks that differ
        hang in `load_best_model_at_end`.
        """
        if _internal_call and output_dir is not None:
            Path(output_dir).mkdir(parents=True, exist_ok=True)
        super().save_model(output_dir, _internal_call)

    def export(self, target: Path, card: str = "") -> int:
        """Gathers the full model (or adapter) and writes it to `target`; returns the number of tensors written.

        Call on all ranks. `target` appears complete and verified, with `card` as its README.md, or not at all.

        Raises:
            UserError: the host lacks memory to gather it; what was written is not what was trained, or can't be.
        """
        writes = self.args.should_save  # rank 0, or one rank per node with --save_on_each_node
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if plugin is not None or self.is_deepspeed_enabled:
            gather.check_host_memory(self.expected.gathered_bytes, writes, target, self._kept_checkpoint)
        if plugin is not None:
            plugin.set_state_dict_type("FULL_STATE_DICT")
        least = max(self.args.ddp_timeout, self.watch.patience.collectives)
        self.watch.patience.collectives = gather.lengthen_timeouts(self.expected.gathered_bytes, least)
        if self.use_cache is not None:  # Trainer turned it off; the export is for inference
            self.model.config.use_cache = self.use_cache
        self.exporting = True
        with self.watch.doing("the export"):
            tensors = self._write(target, card, writes)
            self.exporting = False
            self.accelerator.wait_for_everyone()
        self.watch.end()
        return tensors

    def _write(self, target: Path, card: str, writes: bool) -> int:
        if not writes:
            self.save_model(str(target))  # its part of the gather
            return 0
        with atomic_files.replaced_folder(target) as folder:
            try:
                self.save_model(str(folder))
                exported_folder.finish(folder, self.export_dtype, card)
            except Exception as error:
                if not (full := disks.full(error, folder)):
                    raise
                raise UserError(
                    f"cannot write {target}: {full}",
                    why="training finished, but the export failed",
                    fix=self._export_again(target),
                ) from error
            return exported_folder.verify(folder, self.expected)

    def _export_again(self, target: Path) -> str:
        newest = completeness.choose(target.parent).newest
        return f"free some space, then: accel-fsdp export {newest} {target}" if newest else "free some space"

    def _kept_checkpoint(self) -> Path:
        """The checkpoint of what the model holds now; written, in shards, if there is none. Call on all ranks."""
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint:
            return Path(self.state.best_model_checkpoint)
        folder = Path(self.args.output_dir) / f"{file_names.CHECKPOINT}{self.state.global_step}"
        there = folder.is_dir()
        self.accelerator.wait_for_everyone()  # a rank that begins to save makes it
        if not there:
            if (plugin := getattr(self.accelerator.state, "fsdp_plugin", None)) is not None:
                plugin.state_dict_config = plugin.optim_state_dict_config = None  # else those of the old type stay
                plugin.set_state_dict_type("SHARDED_STATE_DICT")
            self._save_checkpoint(self.model, trial=None)
        return folder

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        if self.exporting and self.args.should_save and self.expected.casts:
            whole = state_dict if state_dict is not None else self.accelerator.unwrap_model(self.model).state_dict()
            state_dict = exported_folder.cast(whole, self.expected.casts)
        if state_dict is not None:
            state_dict = exported_folder.without_tied_copies(state_dict, self.expected.ties)
        super()._save(output_dir, state_dict=state_dict)


class ShardingCheck(TrainerCallback):  # type: ignore[misc]
    """Stops a run whose parameters are not sharded although the YAML asks for it, before the first step."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Measures the wrapped model and says what each rank holds."""
        launch = LaunchEnvironment.now()
        no_shard = launch.uses_fsdp1 and launch.sharding_strategy in ("3", "NO_SHARD")
        holding = sharding_check.measured(kwargs["model"], allow_whole=launch.ignores_modules)
        if args.world_size > 1 and not no_shard and any(unit.ranks == 1 for unit in holding.units):
            raise sharding_check.unsharded("its shards are shared by one rank only")
        if state.is_world_process_zero:
            console.say(f"sharding: {sharding_check.shown(holding)}", style="cyan")


def exported(target: Path, tensors: int, rounding: exported_folder.Rounding | None) -> str:
    """The line that says where the export is, and that its weights are not all of what was trained."""
    rounded = f", {rounding}; --export_dtype {rounding.trained} keeps them" if rounding else ""
    return f"exported and verified: {target} ({counted(tensors, 'tensor')}{rounded})"


def finish(exit_code: int) -> None:
    """Ends the process group, and on CPU the process (see `cpu.finish`).

    After a failure the other ranks may be inside a collective, and ending the group would wait for them.
    """
    cpu.finish(exit_code)
    if exit_code == 0 and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def begin(args: TrainingArguments) -> None:
    """Sets the seed. Progress bars of one rank are enough, and libraries' advice on their APIs is not for users.

    Raises:
        UserError: a library has changed inside.
    """
    check_libraries()
    set_seed(args.seed)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.|transformers\.|accel_fsdp\.cpu")
    warnings.filterwarnings("ignore", message="Please use DTensor instead", category=FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.distributed\.")
    noise = ("The tokenizer has new PAD/BOS/EOS tokens", "Warning: The following arguments do not match")
    loader = logging.getLogger("transformers.trainer_utils")  # once per rank; `resuming.check` refuses what matters
    loader.addFilter(lambda said: not str(said.msg).startswith(noise))
    if args.process_index != 0:
        import datasets
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        datasets.disable_progress_bars()


def summary(state: TrainerState, takes_best: bool) -> list[str]:
    """The first and last value of each loss that Trainer logged, one line each; and where the end wasn't the plan's."""
    lines = []
    for key, name in (("loss", "training loss"), ("eval_loss", "held-out loss")):
        values = [float(entry[key]) for entry in state.log_history if key in entry]
        if values:
            last = f" -> {values[-1]:.4f}" if values[1:] else ""
            lines.append(f"{name}: {values[0]:.4f}{last}")
    if state.global_step < state.max_steps:
        lines.append(f"stopped early: after step {state.global_step} of {state.max_steps}")
    if takes_best and state.best_model_checkpoint:
        name = Path(state.best_model_checkpoint).name
        lines.append(f"the best model is exported: {name}, {state.best_metric:.4f}")
    return lines
