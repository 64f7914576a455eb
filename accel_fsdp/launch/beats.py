"""Messages between ranks through the job's store: heartbeats, and the reasons why ranks end.

They use a separate client of the store: the main thread's client is locked while that thread waits in it.
"""

import contextlib
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist
from torch.distributed import distributed_c10d

from accel_fsdp.launch import rendezvous
from accel_fsdp.launch.store import JsonStore
from accel_fsdp.launch_environment import LaunchEnvironment
from accel_fsdp.library_internals import Internal

RELIES_ON = (
    Internal("torch.distributed.distributed_c10d:_get_default_store", ""),
    Internal("torch.distributed:Store.clone"),
)
GONE, STOPPED, COMPUTES, DEBUGGED = "gone", "stopped", "computes", "debugged"
"""States of another rank's process on the same host."""


@dataclass(frozen=True)
class Beat:
    """A heartbeat.

    `idle` counts the seconds since the last finished step, `still` those at the same instruction. `doing` is empty in a
    step. `step` is None if steps aren't known: then `quiet` counts the seconds without computing or reading, and
    `allowed` is the timeout of the pending `collective`. `address`: where other machines reach this one. `mates`: the
    states of the silent ranks on its host.
    """

    rank: int
    host: str
    machine: str
    pid: int
    has_store: bool = False
    address: str = ""
    number: int = 0
    step: int | None = 0
    doing: str = ""
    idle: float = 0.0
    still: float = 0.0
    quiet: float = 0.0
    allowed: float = 0.0
    collective: str = ""
    caller: str = ""
    mates: Mapping[str, str] = field(default_factory=dict)

    @property
    def seconds_still(self) -> float:
        """Seconds without activity, if steps aren't known. A rank that waits for a GPU may seem to compute."""
        return self.still if self.collective else min(self.still, self.quiet)

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.host} (process {self.pid})"


def first_of(rank: int) -> Beat:
    """The first beat of this process. Ranks with the same `machine` can see each other's processes."""
    host = machine = socket.gethostname()
    with contextlib.suppress(OSError):  # these files exist on Linux only
        machine += os.readlink("/proc/self/ns/pid") + Path("/proc/sys/kernel/random/boot_id").read_text()
    main, address = LaunchEnvironment.now().main_address, ""
    with contextlib.suppress(OSError, UnicodeError):
        address = rendezvous.own_address(main)
    return Beat(rank, host, machine, os.getpid(), has_store=rendezvous.is_own(main), address=address)


def store_of_job(prefix: str) -> Any:
    """A separate client of this job's store; for a single process, a local store."""
    store: Any = distributed_c10d._get_default_store() if dist.is_initialized() else None
    return dist.PrefixStore(prefix, store.clone() if store else dist.HashStore())  # type: ignore[attr-defined]


@dataclass(frozen=True)
class RankMessages(JsonStore):
    """The messages of all ranks in the job's store.

    Calls raise `torch.distributed.DistError`, or a RuntimeError, if the store has ended. If its machine is off, they
    block for many minutes.
    """

    ranks: int = 1

    @classmethod
    def of_job(cls, prefix: str, ranks: int) -> "RankMessages":
        return cls(store_of_job(f"{prefix}/{LaunchEnvironment.now().restarts}"), ranks=ranks)

    def beats(self) -> list[Beat]:
        """The last beat of each rank; empty until all have published one."""
        keys = [f"beat/{rank}" for rank in range(self.ranks)]
        return (
            [Beat(**json.loads(text)) for text in self.torch_store.multi_get(keys)]
            if self.torch_store.check(keys)
            else []
        )

    def of_ranks(self, kind: str) -> dict[int, Any]:
        """The last message of a kind of each rank that has published one."""
        messages = {rank: self.get(f"{kind}/{rank}") for rank in range(self.ranks)}
        return {rank: message for rank, message in messages.items() if message is not None}


def state_of(pid: int, computed: dict[int, float] | None = None) -> str:
    """The state of another rank's process: GONE, STOPPED, DEBUGGED or COMPUTES; empty for one that waits.

    It computes if its CPU time has grown since the last call with the same `computed`, which holds these times.
    """
    try:
        process = psutil.Process(pid)
        status, cpu_times = process.status(), process.cpu_times()
    except psutil.NoSuchProcess:
        return GONE
    if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return GONE
    if status == psutil.STATUS_TRACING_STOP:
        return DEBUGGED
    if status == psutil.STATUS_STOPPED:
        return STOPPED
    if computed is None:
        return ""
    before, computed[pid] = computed.get(pid), cpu_times.user + cpu_times.system
    return COMPUTES if before is not None and computed[pid] > before else ""
