"""Checks that the disk has room for a run's files, and that all machines write to the same disk."""

import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch.distributed.tensor import DTensor

from accel_fsdp import disks
from accel_fsdp.checkpoints import completeness, file_names
from accel_fsdp.errors import UserError
from accel_fsdp.hardware import host
from accel_fsdp.launch_environment import LaunchEnvironment
from accel_fsdp.models import counting, optimizers, state_bytes
from accel_fsdp.time_limits import comes_true
from accel_fsdp.units import distinguishable, gib_or_mib

SHOWN_SECONDS = 30
"""Seconds that NFS may take to show another machine's new names, by its default acdirmin."""


def predicted_bytes(trainer: Any) -> tuple[int, int]:
    """The sizes of a checkpoint and of the export, from the model before it is sharded.

    Mixed precision under FSDP and ZeRO has float32 masters of trained weights. FULL_STATE_DICT stores the weights a
    second time for Hugging Face. An adapter is stored without its base.
    """
    model, state = trainer.model, trainer.accelerator.state
    mixed, zero = trainer.accelerator.mixed_precision != "no", trainer.is_deepspeed_enabled
    sharded = trainer.is_fsdp_enabled or LaunchEnvironment.now().by_transformers
    element_bytes = {
        p: state_bytes.weight_bytes(p.element_size(), mixed, sharded, zero)
        for p in model.parameters()
        if p.requires_grad
    }
    masters = sum(counting.numel(p) * size for p, size in element_bytes.items())
    optimizer = _optimizer_bytes(trainer, element_bytes)
    is_adapter = hasattr(model, "peft_config")
    frozen = (counting.numel(p) * p.element_size() for p in model.parameters() if not p.requires_grad)
    weights = masters + (0 if is_adapter else sum(frozen))
    if zero:
        stored = element_bytes if is_adapter else model.parameters()
        forward = sum(counting.numel(p) * (state_bytes.LOW if mixed else p.element_size()) for p in stored)
        stage = int(state.deepspeed_plugin.zero_stage)
        return state_bytes.checkpoint_bytes(masters, optimizer, zero_stage=stage, forward=forward), weights
    plugin = getattr(state, "fsdp_plugin", None)
    full = plugin is not None and "FULL" in str(plugin.state_dict_type)
    return state_bytes.checkpoint_bytes(weights, optimizer, gathered=full), weights


def _optimizer_bytes(trainer: Any, element_bytes: Mapping[torch.nn.Parameter, int]) -> int:
    """The size of the optimizer's state for these parameters; ZeRO's partitions don't treat embeddings separately."""
    optim = str(trainer.args.optim.value)
    tables = set() if trainer.is_deepspeed_enabled else counting.embeddings(trainer.model)
    return sum(
        optimizers.tensor_bytes(optim, counting.shape(p), size, p in tables) for p, size in element_bytes.items()
    )


def check_shared(trainer: Any, resume_from: str | None) -> None:
    """Raises a UserError, on all ranks, if one sees another disk: shards would not fit together, nor resumed steps."""
    if trainer.on_tpu or not (trainer.is_sharded or trainer.is_deepspeed_enabled):
        return
    folder = Path(trainer.args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".shared-", dir=folder, ignore_cleanup_errors=True) as probe:
        [first, *_] = gather_object([Path(probe).name])
        answers = gather_object([(_sees_file(folder / first), resume_from)])
        trainer.accelerator.wait_for_everyone()
    if all(sees_it for sees_it, _ in answers) and len({start for _, start in answers}) == 1:
        return
    raise UserError(
        f"{trainer.args.output_dir} is not the same folder on all machines",
        why="each would keep its own ranks' part of every checkpoint, and none would be complete",
        fix="--output_dir on a disk that all of them share",
    )


def _sees_file(folder: Path) -> bool:
    """Whether this rank sees rank 0's file; network disks may take a while to show it."""
    return comes_true(lambda: folder.name in os.listdir(folder.parent), SHOWN_SECONDS)


def check_whole_run(trainer: Any, checkpoint_bytes: int, export_bytes: int) -> None:
    """Raises a UserError if the disk is too small for all checkpoints to come and the export."""
    count = _checkpoints_to_come(trainer)
    needed = count * checkpoint_bytes + export_bytes
    text = f"{count} checkpoints of about {gib_or_mib(checkpoint_bytes)} and the export take"
    check(Path(trainer.args.output_dir), needed, text)


def check(output_dir: Path, needed_bytes: int, text: str) -> None:
    """Raises a UserError if the disk of `output_dir` has less free space; `text` names what needs it."""
    disks.check_room(
        output_dir,
        needed_bytes,
        text,
        why="the run would fill the disk",
        fix="free some space, a lower --save_total_limit, fewer saves (--save_steps), or another --output_dir",
    )


def trained_elements(model: torch.nn.Module) -> int:
    """The elements of all trained parameters, before the model is sharded."""
    return sum(counting.numel(parameter) for parameter in model.parameters() if parameter.requires_grad)


def check_staging(trainer: Any, checkpoint_bytes: int, elements: int) -> None:
    """Raises a UserError, on all ranks, if a host lacks memory for copies of its ranks' shards of a checkpoint.

    `elements` are those of the whole model that it stores.
    """
    trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    local = sum((part.to_local() if isinstance(part, DTensor) else part).numel() for part in trained)
    ranks_here = LaunchEnvironment.now().local_world_size
    needed, free = int(checkpoint_bytes * local / elements) * ranks_here, host.free_memory()
    short = [(needed, free)] if free is not None and needed > free else []
    if on_ranks := gather_object(short):
        takes, available = distinguishable(gib_or_mib, *on_ranks[0])
        raise UserError(
            f"--async_checkpoints copies {takes} of shards to a host's memory, {available} are free",
            why="the system would end a rank that runs out of memory",
            fix="leave out --async_checkpoints, or shard over more hosts",
        )


def _checkpoints_to_come(trainer: Any) -> int:
    """The number of additional checkpoints that will be on the disk at once."""
    args, state = trainer.args, trainer.state
    remaining, epochs = state.max_steps - state.global_step, state.num_train_epochs
    per_epoch = state.max_steps / epochs if epochs <= state.max_steps else remaining  # unknown of a stream
    saves = saves_in(args.save_strategy.value, state.save_steps, remaining, per_epoch)
    complete = sum(not completeness.flaw(path) for path in file_names.checkpoints(Path(args.output_dir)))
    kept = args.save_total_limit or 0
    uploading = int(bool(kept and args.checkpoint_uri))  # the one that is being uploaded stays until it is there
    # the newest checkpoint is written before the oldest is deleted
    return min(saves, max(kept + uploading + 1 - complete, 1)) if kept else saves


def saves_in(strategy: str, every: float, steps: int, per_epoch: float) -> int:
    """The number of saves in `steps`, including one at the end; `best` saves at least once."""
    interval = every if every >= 1 else math.ceil(every * steps)
    after = {"steps": interval, "epoch": per_epoch, "best": steps}.get(strategy)
    return math.ceil(steps / max(after, 1)) if after else 0
