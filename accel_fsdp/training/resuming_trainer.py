"""A Trainer that resumes every part of a checkpoint: weights, optimizer, schedule, random states."""

import contextlib
import copy
import logging
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType, broadcast_object_list
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, set_seed
from transformers.trainer_pt_utils import safe_globals

from accel_fsdp import console
from accel_fsdp.checkpoints import file_names, optimizer_names, summary, tensor_names
from accel_fsdp.errors import UserError
from accel_fsdp.library_internals import TRAINER, Internal
from accel_fsdp.models import inspect_model
from accel_fsdp.training import resuming

RELIES_ON = (
    Internal(f"{TRAINER}._load_from_checkpoint", "self resume_from_checkpoint model"),
    Internal(f"{TRAINER}._load_best_model", "self"),
    Internal(f"{TRAINER}._load_optimizer_and_scheduler", "self checkpoint"),
    Internal(f"{TRAINER}._load_rng_state", "self checkpoint"),
    Internal("torch.distributed.checkpoint.state_dict:_init_optim_state", "optim"),
    Internal("torch.distributed.fsdp._common_utils:_get_param_to_fqns", "model dedup_shared_params"),
    Internal("accelerate.utils:FullyShardedDataParallelPlugin.set_state_dict_type", "self state_dict_type"),
)
FSDP1_LOG = logging.getLogger("torch.distributed.fsdp._state_dict_utils")
GPU_STATES = ("cuda", "npu", "hpu", "mlu", "musa")
"""In a checkpoint's random states, those that Trainer keeps for one device or for all."""


class ResumingTrainer(Trainer):  # type: ignore[misc]
    """`Trainer` that reads a checkpoint as it was stored, and misses nothing in silence."""

    @property
    def _on_tpu(self) -> bool:
        return bool(self.accelerator.distributed_type == DistributedType.XLA)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if hasattr(self.model, "peft_config") and self.is_fsdp_enabled:
            trained = [tensor_names.clean_name(name) for name, p in self.model.named_parameters() if p.requires_grad]
            resuming.check_adapter(Path(resume_from_checkpoint), trained)
        with self._as_stored(resume_from_checkpoint), self._without_frozen():
            if self._is_filed_otherwise():
                self._load_filed(resume_from_checkpoint)
            else:
                super()._load_from_checkpoint(resume_from_checkpoint, model=model)

    def _load_best_model(self) -> None:
        checkpoint = self.state.best_model_checkpoint
        with self._as_stored(checkpoint), self._without_frozen():
            if self._is_filed_otherwise() and checkpoint is not None:
                self._load_filed(checkpoint)
            else:
                super()._load_best_model()

    def _is_filed_otherwise(self) -> bool:
        """Whether `save_pretrained` gives the weights other names or shapes in files than they have in the model.

        Such are the fused experts of a mixture, and models with images. Trainer takes from such a file what has the
        model's names, and goes on from the untrained rest with no more than a warning (transformers 5.23).
        """
        own_format = self.is_fsdp_enabled or self.is_deepspeed_enabled or self._on_tpu
        whole = not own_format and not hasattr(self.model, "peft_config")
        return whole and bool(getattr(self.model, "_weight_conversions", None))

    def _load_filed(self, checkpoint: str) -> None:
        """As transformers loads them from a model's folder; float32 holds exactly whatever is stored."""
        config = copy.deepcopy(self.model.config)
        loaded, found = type(self.model).from_pretrained(
            checkpoint, config=config, dtype=torch.float32, output_loading_info=True, trust_remote_code=False
        )
        if found["missing_keys"]:
            raise KeyError(f"it lacks {min(found['missing_keys'])}")
        self.model.load_state_dict(loaded.state_dict())

    @contextlib.contextmanager
    def _without_frozen(self) -> Iterator[None]:
        """Keeps FSDP1 from naming each frozen weight that an adapter's checkpoint rightly lacks, on every rank."""
        if not hasattr(self.model, "peft_config"):
            yield
            return
        FSDP1_LOG.addFilter(_is_no_absence)
        try:
            yield
        finally:
            FSDP1_LOG.removeFilter(_is_no_absence)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Creates FSDP1's optimizer state before loading into it.

        A fresh optimizer offers no state to fill, so `FSDP.optim_state_dict` asks the checkpoint for nothing and Adam
        restarts from zero, silently (accelerate 1.15). FSDP2's path creates it with this same function of torch.
        """
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        with self._as_trained(checkpoint if plugin is not None else None):
            if checkpoint is not None and plugin is not None and plugin.fsdp_version == 1:
                from torch.distributed.checkpoint.state_dict import _init_optim_state

                _init_optim_state(self.optimizer.optimizer)
            with self._as_stored(checkpoint):
                super()._load_optimizer_and_scheduler(checkpoint)
        schedule = getattr(self.lr_scheduler, "scheduler", self.lr_scheduler)
        if checkpoint is not None and isinstance(schedule, LambdaLR):
            self._take_rates(schedule)

    @contextlib.contextmanager
    def _as_trained(self, checkpoint: str | None) -> Iterator[None]:
        """Keeps torch from asking for states that a checkpoint rightly lacks: of parameters without a gradient so far.

        It creates a state for whatever asks for gradients, and wants each from the checkpoint (torch 2.13); such are
        the image encoder and experts that no row has reached. Whatever was not trained at all is missed as ever.
        """
        without = [] if checkpoint is None or self._on_tpu else self._without_state(Path(checkpoint))
        for one in without:
            one.requires_grad_(False)
        try:
            yield
        finally:
            for one in without:
                one.requires_grad_(True)

    def _without_state(self, checkpoint: Path) -> list[torch.nn.Parameter]:
        from torch.distributed.fsdp._common_utils import _get_param_to_fqns

        stored = broadcast_object_list([_names_in(checkpoint) if self.args.process_index == 0 else None])[0]
        if stored is None or not stored.with_state:
            return []
        named = _get_param_to_fqns(self.model, dedup_shared_params=False)
        names = {one: {tensor_names.clean_name(name) for name in names} for one, names in named.items()}
        return [
            one
            for one, own in names.items()
            if one.requires_grad and own & stored.trained and not own & stored.with_state
        ]

    def _take_rates(self, schedule: LambdaLR) -> None:
        """This run's rate for the next step: the stored one is zero where the schedule had come to its end."""
        rates = [
            base * rate(schedule.last_epoch) for base, rate in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
        ]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        schedule._last_lr = rates

    @contextlib.contextmanager
    def _as_stored(self, checkpoint: str | None) -> Iterator[None]:
        """Reads a checkpoint in the way it was stored, whatever the YAML says about the next; all failures are one."""
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        try:
            with contextlib.nullcontext() if plugin is None or checkpoint is None else _kind(plugin, Path(checkpoint)):
                yield
        except (OSError, RuntimeError, ValueError, KeyError, CheckpointException) as error:
            raise UserError(
                f"cannot resume from {checkpoint}: {cause(error)}",
                why="the checkpoint is incomplete, or was written with other model, LoRA or state dict settings",
                fix="resume with the flags and the YAML of that run, or from an older checkpoint-N",
            ) from error

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """On another number of ranks, those without a state get one of their own; Trainer's would repeat step 0.

        The first rank's has another name where it was the only one, or is now.
        """
        rank, ranks = self.args.process_index, self.args.world_size
        if checkpoint is None or (Path(checkpoint) / file_names.rng_state(rank, ranks)).is_file():
            super()._load_rng_state(checkpoint)
            return
        other = Path(checkpoint) / file_names.rng_state(0, 1 if ranks > 1 else 2)
        if rank == 0 and other.is_file():
            with tempfile.TemporaryDirectory() as folder:
                _convert_rng(other, Path(folder) / file_names.rng_state(0, ranks), ranks)
                super()._load_rng_state(folder)
            return
        set_seed(self.args.seed + self.state.global_step * ranks + rank)
        console.say(f"rank {rank}: no random state in {checkpoint}; dropout differs from here on", style="yellow")


def cause(error: BaseException) -> str:
    """What happened, in a line: of a sharded checkpoint on the first rank that failed; without gloo's advice."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return re.sub(r"^\[[^]]*\] ", "", inspect_model.first_line(error)).partition(" This is typically caused")[0]


@contextlib.contextmanager
def _kind(plugin: Any, checkpoint: Path) -> Iterator[None]:
    """`plugin` with the state dict type of the checkpoint's files; its configs go along, or they stay the other's."""
    found = summary.facts_of(checkpoint)
    before = plugin.state_dict_type, plugin.state_dict_config, plugin.optim_state_dict_config
    if found.sharded or found.full:
        plugin.state_dict_config = plugin.optim_state_dict_config = None
        plugin.set_state_dict_type("SHARDED_STATE_DICT" if found.sharded else "FULL_STATE_DICT")
    try:
        yield
    finally:
        plugin.state_dict_type, plugin.state_dict_config, plugin.optim_state_dict_config = before


def _names_in(checkpoint: Path) -> optimizer_names.OptimizerNames | None:
    """None where they can't be read here: torch then says what is wrong, or knows tensors that our reader doesn't."""
    try:
        return optimizer_names.read(checkpoint)
    except UserError:
        return None


def _is_no_absence(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Did not find param with FQN")


def _convert_rng(source: Path, target: Path, ranks: int) -> None:
    """The first rank's random state in the form for that many ranks: of several, it holds those of all GPUs it saw."""
    with safe_globals():
        state = torch.load(source, weights_only=True)
    for name, found in state.items():
        if name in GPU_STATES and isinstance(found, list) != (ranks > 1):
            state[name] = [found] if ranks > 1 else found[0]
    torch.save(state, target)
