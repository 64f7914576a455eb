"""Calls a function of a test on each rank of a gloo group."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as processes

from accel_fsdp.ranks import cpu


def on_ranks(ranks: int, folder: Path, function: Callable[..., Any], *args: Any) -> None:
    """The function is at the top of a module. Raises if it fails on a rank; the ranks meet in `folder`."""
    processes.spawn(_called, (ranks, str(folder / "store"), function, args), nprocs=ranks)


def _called(rank: int, ranks: int, store: str, function: Callable[..., Any], args: Any) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    cpu.begin_rank()
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=ranks)
    function(*args)
