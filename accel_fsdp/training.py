"""What `train/sft.py` is made of: model loading, a Trainer that checks its sharding, resumes in full and exports."""

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    EarlyStoppingCallback,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from accel_fsdp import adapters, cpu, export, facts, files, forecast, gathering, render, reporting, sharding
from accel_fsdp.arguments import SEE_HELP, ModelArguments
from accel_fsdp.errors import UserError
from accel_fsdp.refusals import check_layer_classes

if TYPE_CHECKING:
    from torch import nn


def load_tokenizer(options: ModelArguments) -> PreTrainedTokenizerBase:
    """Loads the model's tokenizer; one without a padding token pads with its end-of-sequence token.

    Raises:
        UserError: the model or its tokenizer can't be read.
    """
    facts.read_config(options.model_name_or_path, options.model_revision)
    try:
        tokenizer = AutoTokenizer.from_pretrained(options.model_name_or_path, revision=options.model_revision)
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot load a tokenizer from {options.model_name_or_path}: {facts.first_line(error)}",
            why="the data can't be turned into tokens",
            fix="copy the tokenizer files of the base model into that folder",
        ) from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(options: ModelArguments) -> "nn.Module":
    """Loads the model on the CPU, with a LoRA adapter where asked for; `prepare` shards it later.

    Raises:
        UserError: the weights can't be read, or no module matches `lora_target_modules`.
    """
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(
            options.model_name_or_path,
            revision=options.model_revision,
            dtype=_dtype(options),
            attn_implementation=options.attn_implementation,
            quantization_config=_quantization(options),
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
        raise UserError(
            f"cannot load the weights of {options.model_name_or_path}: {facts.first_line(error)}",
            why="there is nothing to train",
            fix="check the name, or give a folder that save_pretrained wrote",
        ) from error
    if missing := sorted(loading["missing_keys"]):
        raise UserError(
            f"{options.model_name_or_path} lacks {len(missing)} weights of its model, first {missing[0]}",
            why="they would be trained from random values",
            fix="download or export the model again",
        )
    return _with_adapter(model, options) if options.use_peft else model


def _dtype(options: ModelArguments) -> str | torch.dtype:
    """Explicit, because a 16-bit checkpoint under `mixed_precision: 'no'` would train without fp32 master weights."""
    if options.dtype == "auto":
        return "auto" if options.use_peft else torch.float32
    dtype: torch.dtype = getattr(torch, options.dtype)
    return dtype


def _quantization(options: ModelArguments) -> Any:
    """4-bit weights packed in a floating dtype, the only kind that FSDP can shard; computed in that same dtype."""
    if not options.load_in_4bit:
        return None
    from transformers import BitsAndBytesConfig

    storage = getattr(torch, options.bnb_4bit_quant_storage)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=options.bnb_4bit_quant_type,
        bnb_4bit_quant_storage=storage,
        bnb_4bit_compute_dtype=storage if storage.is_floating_point else torch.bfloat16,
    )


def _with_adapter(model: Any, options: ModelArguments) -> "nn.Module":
    from peft import LoraConfig, get_peft_model

    adapters.enable()
    targets = options.lora_target_modules
    config = LoraConfig(
        r=options.lora_r,
        lora_alpha=options.lora_alpha,
        lora_dropout=options.lora_dropout,
        target_modules="all-linear" if targets == ["all-linear"] else targets,
        task_type="CAUSAL_LM",
    )
    try:
        adapted: nn.Module = get_peft_model(model, config)
    except ValueError as error:
        raise UserError(
            f"no adapter can be made: {facts.first_line(error)}",
            why="nothing would be trained",
            fix="--lora_target_modules all-linear, or names of linear modules such as q_proj v_proj",
        ) from error
    return adapted


class SftTrainer(Trainer):  # type: ignore[misc]
    """`Trainer` that refuses unsharded training, resumes FSDP1's optimizer, and exports a verified folder."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        model = kwargs["model"]
        self.revision = getattr(model.config, "_commit_hash", None) or "main"
        self.use_cache = getattr(model.config, "use_cache", None)
        _check_wrap_classes(model)
        _check_buffers(model)
        if kwargs["args"].process_index == 0:
            self.lock = files.only_run(Path(kwargs["args"].output_dir))
        try:
            super().__init__(*args, **kwargs)
        except (ValueError, ImportError) as error:
            raise UserError(
                f"Trainer refuses this combination: {facts.first_line(error)}", why="training can't start", fix=SEE_HELP
            ) from error
        job = forecast.job_of(model, self.args, self.accelerator)
        self.report = reporting.Report(job, self.accelerator)
        self.report.replace_printers(self)
        if self.args.early_stopping_patience is not None:
            self.add_callback(EarlyStoppingCallback(self.args.early_stopping_patience))
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if plugin is not None:
            self.add_callback(ShardingCheck())
        elif self.accelerator.is_main_process:
            kind = self.accelerator.distributed_type.value
            render.say(f"{kind}: no FSDP, as the YAML says; each rank may hold the whole model", style="yellow")
        self.export_dtype = self._export_dtype(model)
        saved_as = getattr(torch, self.export_dtype) if self.export_dtype else None
        self.expected = export.expected_tensors(model, self._trained_as(), saved_as)
        self.exporting = False

    def _export_dtype(self, model: Any) -> str:
        """The name of the dtype to export in; empty: as trained, which is the default of an adapter."""
        if self.args.export_dtype != "auto":
            return str(self.args.export_dtype)
        if hasattr(model, "peft_config"):
            return ""
        return facts.stored_dtype(model.config._name_or_path, self.revision)

    def _trained_as(self) -> torch.dtype | None:
        """Mixed precision: FSDP trains float32 master weights, DeepSpeed a 16-bit model beside its own."""
        precision = self.accelerator.mixed_precision
        if getattr(self.accelerator.state, "deepspeed_plugin", None) is not None:
            return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
        fsdp = getattr(self.accelerator.state, "fsdp_plugin", None) is not None
        return torch.float32 if fsdp and precision != "no" else None

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Creates FSDP1's optimizer state before loading into it.

        A fresh optimizer offers no state to fill, so `FSDP.optim_state_dict` asks the checkpoint for nothing and Adam
        restarts from zero, silently (accelerate 1.15). FSDP2's path creates it with this same function of torch.
        """
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if checkpoint is not None and plugin is not None and plugin.fsdp_version == 1:
            from torch.distributed.checkpoint.state_dict import _init_optim_state

            _init_optim_state(self.optimizer.optimizer)
        with _unreadable_checkpoint(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        with _unreadable_checkpoint(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model=model)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Trains on one micro-batch, and counts it."""
        self.report.tally.count(inputs)
        loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs as `Trainer` does, with rate and memory beside the loss."""
        self.report.add_metrics(logs)
        super().log(logs, start_time)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trains as `Trainer` does.

        Raises:
            UserError: memory is used up; with what the plan says would free some.
        """
        with self.report.explains_out_of_memory():
            return super().train(*args, **kwargs)

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
        if plugin is not None:
            gathering.check_host_memory(self.expected.gathered_bytes, writes, target, self._kept_checkpoint)
            plugin.set_state_dict_type("FULL_STATE_DICT")
        gathering.lengthen_timeouts(self.expected.gathered_bytes, self.args.ddp_timeout)
        if self.use_cache is not None:  # Trainer turned it off; the export is for inference
            self.model.config.use_cache = self.use_cache
        self.exporting = True
        tensors = self._write(target, card, writes)
        self.exporting = False
        self.accelerator.wait_for_everyone()
        return tensors

    def _write(self, target: Path, card: str, writes: bool) -> int:
        if not writes:
            self.save_model(str(target))  # its part of the gather
            return 0
        with files.replaced_folder(target) as folder:
            self.save_model(str(folder))
            export.finish(folder, self.export_dtype, card)
            return export.verify(folder, self.expected)

    def _kept_checkpoint(self) -> Path:
        """The checkpoint of what the model holds now; written, in shards, if there is none. Call on all ranks."""
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint:
            return Path(self.state.best_model_checkpoint)
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        if not folder.is_dir():
            plugin = self.accelerator.state.fsdp_plugin
            plugin.state_dict_config = plugin.optim_state_dict_config = None  # else those of the old type stay
            plugin.set_state_dict_type("SHARDED_STATE_DICT")
            self._save_checkpoint(self.model, trial=None)
        return folder

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        if self.exporting and self.args.should_save and self.expected.casts:
            whole = state_dict if state_dict is not None else self.accelerator.unwrap_model(self.model).state_dict()
            state_dict = export.cast(whole, self.expected.casts)
        if state_dict is not None:
            state_dict = export.without_tied_copies(state_dict, self.expected.ties)
        super()._save(output_dir, state_dict=state_dict)


class ShardingCheck(TrainerCallback):  # type: ignore[misc]
    """Stops a run whose parameters are not sharded although the YAML asks for it, before the first step."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Measures the wrapped model and says what each rank holds."""
        strategy = os.environ.get("FSDP_SHARDING_STRATEGY", "").upper()
        no_shard = os.environ.get("FSDP_VERSION") == "1" and strategy in ("3", "NO_SHARD")
        ignores = bool(os.environ.get("FSDP_IGNORED_MODULES"))
        report = sharding.measure(kwargs["model"], allow_unsharded=ignores)
        if report.shard_ranks == 1 and args.world_size > 1 and not no_shard:
            raise sharding.unsharded("its shards are shared by one rank only")
        if state.is_world_process_zero:
            render.say(f"sharding: {report}", style="cyan")


def _check_wrap_classes(model: "nn.Module") -> None:
    """Checks the names that Accelerate will look for, before Trainer creates its output folder.

    Without names in the YAML they are the model's `_no_split_modules`; with none there either, Accelerate wraps nothing
    and says nothing.
    """
    if not cpu.fsdp_requested() or os.environ.get("FSDP_AUTO_WRAP_POLICY", "").upper() != "TRANSFORMER_BASED_WRAP":
        return
    given = os.environ.get("FSDP_TRANSFORMER_CLS_TO_WRAP")
    names = given.split(",") if given else list(getattr(model, "_no_split_modules", None) or ())
    found = ", ".join(layer.name for layer in facts.wrap_classes(model))
    if not names:
        raise UserError(
            "the YAML names no transformer layer class, and the model doesn't either",
            why="FSDP would make one unit of the whole model and save no memory",
            fix=f"fsdp_transformer_layer_cls_to_wrap: {found or 'NAME'}",
        )
    check_layer_classes(tuple(names), facts.class_names(model))


def _check_buffers(model: "nn.Module") -> None:
    """Stops before accelerate 1.15 would: its FSDP2 loading takes every entry of the state dict for a DTensor."""
    loading = os.environ.get("FSDP_CPU_RAM_EFFICIENT_LOADING", "").lower() == "true"
    stored = facts.persistent_buffers(model)
    if cpu.fsdp_requested() and os.environ.get("FSDP_VERSION") == "2" and loading and stored:
        raise UserError(
            f"the model stores {stored} buffers, and the YAML asks FSDP2 for RAM-efficient loading",
            why="accelerate 1.15 stops at prepare: 'Tensor' object has no attribute 'device_mesh'",
            fix="fsdp_cpu_ram_efficient_loading: false in the YAML",
        )


@contextlib.contextmanager
def _unreadable_checkpoint(folder: str | None) -> Iterator[None]:
    """Turns the ways in which a checkpoint fails to load into one message."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except (OSError, RuntimeError, ValueError, KeyError, CheckpointException) as error:
        raise UserError(
            f"cannot resume from {folder}: {facts.first_line(error)}",
            why="the checkpoint is incomplete, or was written with other model, LoRA or state dict settings",
            fix="resume with the flags and the YAML of that run, or from an older checkpoint-N",
        ) from error


def finish(exit_code: int) -> None:
    """Ends the process group, and on CPU the process (see `cpu.finish`).

    After a failure the other ranks may be inside a collective, and ending the group would wait for them.
    """
    cpu.finish(exit_code)
    if exit_code == 0 and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def quiet(process_index: int) -> None:
    """Progress bars of one rank are enough; and torch's advice about FSDP1's API is not for the user of this script."""
    warnings.filterwarnings("ignore", message="FSDP.state_dict_type", category=FutureWarning)
    if process_index != 0:
        import datasets
        from transformers.utils import logging

        logging.disable_progress_bar()
        datasets.disable_progress_bars()


def summary(log_history: list[dict[str, float]]) -> list[str]:
    """The first and last value of each loss that Trainer logged, one line each."""
    lines = []
    for key, name in (("loss", "training loss"), ("eval_loss", "held-out loss")):
        values = [float(entry[key]) for entry in log_history if key in entry]
        if values:
            lines.append(f"{name}: {values[0]:.4f} -> {values[-1]:.4f}")
    return lines
