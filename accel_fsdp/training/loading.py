"""Loads every part of a checkpoint: weights, optimizer, schedule, random states.

`Trainer` (transformers 5.23) and accelerate 1.15 silently leave out some parts. Each function here wraps one
of Trainer's own methods, which it is given as `load`.
"""

import contextlib
import copy
import logging
import os
import pickle
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate.utils import broadcast_object_list
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim.lr_scheduler import LambdaLR
from transformers import set_seed
from transformers.trainer_pt_utils import safe_globals

from accel_fsdp import console
from accel_fsdp.checkpoints import ERRORS, clean_name, completeness, dcp, file_names, saved_files
from accel_fsdp.errors import UserError, first_line
from accel_fsdp.library_internals import Internal
from accel_fsdp.training import mesh_checkpoints, patches

RELIES_ON = (
    Internal("torch.distributed.checkpoint.state_dict:_init_optim_state", "optim"),
    Internal("torch.distributed.fsdp._common_utils:_get_param_to_fqns", "model dedup_shared_params"),
    Internal("accelerate.utils:FullyShardedDataParallelPlugin.set_state_dict_type", "self state_dict_type"),
)
FSDP1_LOG = logging.getLogger("torch.distributed.fsdp._state_dict_utils")
RESTRICTED, UNRESTRICTED = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
STATES, GROUPS, MEMBERS = "state", "param_groups", "params"
"""The keys of an optimizer's state dict, and the key of the parameters in each group."""
GPU_STATES = ("cuda", "npu", "hpu", "mlu", "musa")
"""The keys of a checkpoint's random states that Trainer keeps for one device or for all."""


@contextlib.contextmanager
def as_data(by_deepspeed: bool) -> Iterator[None]:
    """In the block, torch and DeepSpeed load tensors, plain data and their own few types, and run no code of a file.

    DeepSpeed passes `weights_only=False` (0.19). A user's own setting of torch's variable is kept.
    """
    with patches.reading_as_data():
        if not by_deepspeed or os.environ.get(UNRESTRICTED):
            yield
            return
        from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
        from deepspeed.runtime.zero.config import ZeroStageEnum
        from deepspeed.utils.tensor_fragment import fragment_address

        own_types = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
        with torch.serialization.safe_globals(own_types), mock.patch.dict(os.environ, {RESTRICTED: "1"}):
            yield


def weights(trainer: Any, checkpoint: str | None, load: Callable[[], None]) -> None:
    """Loads the weights as they were stored, independent of the YAML's settings for the next checkpoint.

    `save_pretrained` gives the weights of some models other names or shapes in files than they have in the model: the
    fused experts of a mixture, and models with images. From such a file Trainer loads only the tensors with the model's
    names, and leaves the others untrained, with only a warning (transformers 5.23).
    """
    own_format = trainer.is_sharded or trainer.is_deepspeed_enabled
    converts = not (own_format or _has_adapter(trainer)) and bool(getattr(trainer.model, "_weight_conversions", None))
    with as_data(trainer.is_deepspeed_enabled), _as_stored(trainer, checkpoint), _without_frozen(trainer):
        if trainer.by_transformers and checkpoint is not None:
            mesh_checkpoints.load_weights(trainer.model, Path(checkpoint))
        elif converts and checkpoint is not None:
            _load_converted(trainer.model, checkpoint)
        else:
            load()


def optimizer_and_schedule(trainer: Any, checkpoint: str | None, load: Callable[[], None]) -> None:
    """Loads the optimizer's state, which FSDP1's optimizer must create first, and sets this run's learning rates.

    A new optimizer has no state to fill, so `FSDP.optim_state_dict` requests nothing from the checkpoint, and Adam
    silently restarts from zero (accelerate 1.15). FSDP2's path creates it with this same function of torch.
    """
    plugin = _fsdp_plugin(trainer)
    with _as_trained(trainer, checkpoint if trainer.is_sharded else None):
        if checkpoint is not None and plugin is not None and plugin.fsdp_version == 1:  # FSDP2's path does it itself
            from torch.distributed.checkpoint.state_dict import _init_optim_state

            _init_optim_state(trainer.optimizer.optimizer)
        with _as_stored(trainer, checkpoint):
            if trainer.by_transformers and checkpoint is not None:
                mesh_checkpoints.load_optimizer(trainer, Path(checkpoint))
            else:
                load()
    schedule = getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler)
    if checkpoint is not None and isinstance(schedule, LambdaLR):
        _take_rates(trainer.optimizer, schedule)


def random_state(trainer: Any, checkpoint: str | None, load: Callable[[str | None], None]) -> None:
    """Loads this rank's random state; on a different number of ranks, those without one get a new one.

    Trainer's own would repeat that of step 0. The first rank's file has another name where it was the only rank, or is
    now.
    """
    rank, ranks = trainer.args.process_index, trainer.args.world_size
    if checkpoint is None or (Path(checkpoint) / file_names.rng_state(rank, ranks)).is_file():
        load(checkpoint)
        return
    other_layout = Path(checkpoint) / file_names.rng_state(0, 1 if ranks > 1 else 2)
    if rank == 0 and other_layout.is_file():
        with tempfile.TemporaryDirectory() as folder:
            _convert_rng(other_layout, Path(folder) / file_names.rng_state(0, ranks), ranks)
            load(folder)
        return
    set_seed(trainer.args.seed + trainer.state.global_step * ranks + rank)
    console.say(
        f"rank {rank}: no random state in {checkpoint}; dropout masks differ from those of one run", style="yellow"
    )


def cause(error: BaseException) -> str:
    """The error in one line; for a sharded checkpoint the error of the first failed rank.

    The libraries' advice is removed: torch's, for a file that names code, is to run that code.
    """
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    if isinstance(error, pickle.UnpicklingError):
        return "one of its files is damaged, or names what could run code; nothing was executed"
    return re.sub(r"^\[[^]]*\] ", "", first_line(error)).partition(" This is typically caused")[0]


def _has_adapter(trainer: Any) -> bool:
    return hasattr(trainer.model, "peft_config")


def _fsdp_plugin(trainer: Any) -> Any:
    return getattr(trainer.accelerator.state, "fsdp_plugin", None)


def _load_converted(model: Any, checkpoint: str) -> None:
    """Loads the weights as transformers does from a model's folder; float32 holds every stored value exactly."""
    config = copy.deepcopy(model.config)
    loaded, report = type(model).from_pretrained(
        checkpoint, config=config, dtype=torch.float32, output_loading_info=True, trust_remote_code=False
    )
    if report["missing_keys"]:
        raise KeyError(f"it lacks {min(report['missing_keys'])}")
    model.load_state_dict(loaded.state_dict())


@contextlib.contextmanager
def _as_stored(trainer: Any, checkpoint: str | None) -> Iterator[None]:
    """In the block, FSDP's state dict type is that of the checkpoint's files, and failures become one error."""
    plugin = _fsdp_plugin(trainer)
    try:
        with contextlib.nullcontext() if plugin is None or checkpoint is None else _as_files(plugin, Path(checkpoint)):
            yield
    except (OSError, RuntimeError, *ERRORS, CheckpointException) as error:
        raise UserError(
            f"cannot resume from {checkpoint}: {cause(error)}",
            why="the checkpoint is incomplete, or was written with other model, LoRA or state dict settings",
            fix="resume with the flags and the YAML of that run, or from an older checkpoint-N",
        ) from error


@contextlib.contextmanager
def _as_files(plugin: Any, checkpoint: Path) -> Iterator[None]:
    """Gives `plugin` the state dict type of the checkpoint's files, and the configs of that type."""
    stored = completeness.state_dict_type(checkpoint)
    before = plugin.state_dict_type, plugin.state_dict_config, plugin.optim_state_dict_config
    if stored in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
        plugin.state_dict_config = plugin.optim_state_dict_config = None
        plugin.set_state_dict_type(stored)
    try:
        yield
    finally:
        plugin.state_dict_type, plugin.state_dict_config, plugin.optim_state_dict_config = before


@contextlib.contextmanager
def _without_frozen(trainer: Any) -> Iterator[None]:
    """Keeps FSDP1 from logging each frozen weight that an adapter's checkpoint rightly lacks, on every rank."""
    if not _has_adapter(trainer):
        yield
        return
    FSDP1_LOG.addFilter(_is_other_message)
    try:
        yield
    finally:
        FSDP1_LOG.removeFilter(_is_other_message)


def _is_other_message(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Did not find param with FQN")


@contextlib.contextmanager
def _as_trained(trainer: Any, checkpoint: str | None) -> Iterator[None]:
    """Keeps torch from requiring states that a checkpoint rightly lacks: those of parameters without a gradient so far.

    It creates a state for each tensor that requires gradients, such as an image encoder and experts that no row has
    reached, and reads each from the checkpoint (torch 2.13). States of trained tensors are still required.
    """
    without = [] if checkpoint is None else _without_state(trainer, Path(checkpoint))
    for parameter in without:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in without:
            parameter.requires_grad_(True)


def _without_state(trainer: Any, checkpoint: Path) -> list[torch.nn.Parameter]:
    from torch.distributed.fsdp._common_utils import _get_param_to_fqns

    stored = broadcast_object_list([_names_in(checkpoint) if trainer.args.process_index == 0 else None])[0]
    trained, with_state = stored or (frozenset(), frozenset())
    if not with_state:
        return []
    fqns = _get_param_to_fqns(trainer.model, dedup_shared_params=False)
    cleaned = {parameter: {clean_name(name) for name in names} for parameter, names in fqns.items()}
    return [
        parameter
        for parameter, names in cleaned.items()
        if parameter.requires_grad and names & trained and not names & with_state
    ]


def _names_in(checkpoint: Path) -> tuple[frozenset[str], frozenset[str]] | None:
    """The parameters that the saved optimizer trained, and those that had a state; no state is read.

    None if they can't be read here. Torch then reads them itself, or reports the error.
    """
    sharded = checkpoint / file_names.SHARDED_OPTIMIZER
    try:
        if sharded.is_dir():  # paths begin with Accelerate's name for an optimizer
            listed = dcp.listed(sharded, lambda path: path[1:2] == (GROUPS,) and path[-1] == MEMBERS)
            trained = [name for members in listed.values() for name in members or ()]
            with_state = [path[2] for path in listed if path[1:2] == (STATES,)]
        else:
            content = saved_files.load(checkpoint / file_names.FULL_OPTIMIZER)
            trained = [name for group in content[GROUPS] for name in group[MEMBERS]]
            with_state = list(content[STATES])
        return frozenset(map(clean_name, trained)), frozenset(map(clean_name, with_state))
    except (*ERRORS, UserError):
        return None


def _take_rates(optimizer: Any, schedule: LambdaLR) -> None:
    """Sets this run's rate for the next step: the stored rate is zero if the schedule had ended."""
    rates = [
        base * rate(schedule.last_epoch) for base, rate in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
    ]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    schedule._last_lr = rates


def _convert_rng(source: Path, target: Path, ranks: int) -> None:
    """Converts the first rank's random state to that of `ranks` ranks; with several, it holds all visible GPUs."""
    with safe_globals():
        state = torch.load(source, weights_only=True)
    for name, value in state.items():
        if name in GPU_STATES and isinstance(value, list) != (ranks > 1):
            state[name] = [value] if ranks > 1 else value[0]
    torch.save(state, target)
