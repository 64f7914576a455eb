"""Checks the disk that all machines write to, and the memory for copies of shards."""

import os
import tempfile
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from torch.distributed.tensor import DTensor

from accel_fsdp.errors import UserError
from accel_fsdp.hardware import host
from accel_fsdp.launch_environment import LaunchEnvironment
from accel_fsdp.models import optimizers
from accel_fsdp.units import distinguishable, gib_or_mib
from accel_fsdp.waiting import comes_true

SHOWN_SECONDS = 30
"""Seconds that NFS may take to show another machine's new names, by its default acdirmin."""


def check_shared(trainer: Any, resume_from: str | None) -> None:
    """Raises a UserError, on all ranks, if one sees another disk: shards would not fit together, nor resumed steps."""
    if not (trainer.is_sharded or trainer.is_deepspeed_enabled):
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


def check_staging(trainer: Any) -> None:
    """Raises a UserError, on all ranks, if a host lacks memory for copies of its ranks' shards of a checkpoint."""
    optim, is_adapter = str(trainer.args.optim.value), hasattr(trainer.model, "peft_config")
    own_bytes = 0
    for parameter in trainer.model.parameters():
        part = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if parameter.requires_grad or not is_adapter:
            own_bytes += part.numel() * part.element_size()
        if parameter.requires_grad:
            own_bytes += optimizers.tensor_bytes(optim, part.shape, part.element_size())
    needed, free = own_bytes * LaunchEnvironment.now().local_world_size, host.free_memory()
    short = [(needed, free)] if free is not None and needed > free else []
    if on_ranks := gather_object(short):
        takes, available = distinguishable(gib_or_mib, *on_ranks[0])
        raise UserError(
            f"--async_checkpoints copies {takes} of shards to a host's memory, {available} are free",
            why="the system would end a rank that runs out of memory",
            fix="leave out --async_checkpoints, or shard over more hosts",
        )
