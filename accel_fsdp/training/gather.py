"""Prepares the gathering of a whole model on one rank: checks host memory, and extends the timeout of collectives."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from accel_fsdp.errors import UserError
from accel_fsdp.hardware import host
from accel_fsdp.library_internals import Internal
from accel_fsdp.models import state_bytes
from accel_fsdp.units import gib_or_mib, told_apart

RELIES_ON = (Internal("torch.distributed.distributed_c10d:_world.pg_map"),)
SLOWEST_BYTES_PER_S = 50e6
"""The rate of a busy network file system; a local disk is 10 to 60 times as fast."""


def check_host_memory(gathered_bytes: int, gathers_here: bool, target: Path, checkpoint: Callable[[], Path]) -> None:
    """Stops all ranks before a gather if one of them lacks memory, because the kernel would kill it. Collective.

    `gathers_here` says that this rank will hold the whole model. `checkpoint` makes sure that a checkpoint is on disk,
    on all ranks. Raises: UserError: a rank's host has less free memory than the model takes.
    """
    free = host.free_memory() if gathers_here else None
    needed = state_bytes.gathering_bytes(gathered_bytes)
    short = free is not None and needed > free
    frees: list[int | None] = [free if short else None]
    if dist.is_initialized():
        frees = [None] * dist.get_world_size()
        dist.all_gather_object(frees, free if short else None)
    least = min((free for free in frees if free is not None), default=None)
    if least is None:
        return
    saved, (takes, there) = checkpoint(), told_apart(gib_or_mib, needed, least)
    raise UserError(
        f"the whole model takes {takes} of host memory, {there} are free",
        why=f"the system would end the process that gathers it; nothing is lost, {saved.name} holds what was trained",
        fix=f"accel-fsdp export {saved} {target}, which needs memory for one tensor at a time",
    )


def lengthen_timeouts(model_bytes: int, least_seconds: float) -> float:
    """Gives the collectives of all groups the time that writing the model may take; returns it in seconds.

    The other ranks wait in a collective while the first rank writes, and the watchdog's default of 10 or 30 minutes
    would end them. Never shorter than `least_seconds`, the job's own. Call on all ranks.
    """
    seconds = max(least_seconds, model_bytes / SLOWEST_BYTES_PER_S)
    if dist.is_initialized():
        from torch.distributed.distributed_c10d import _world

        dist.barrier()  # what is still under way keeps its own timeout
        for group in list(_world.pg_map):
            group.set_timeout(timedelta(seconds=seconds))
    return seconds
