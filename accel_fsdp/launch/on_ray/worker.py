"""Runs one rank for a worker of Ray Train, in a separate process.

A worker's function runs in a thread beside Ray's own, where no signal arrives, and a rank that has failed in the middle
of a collective can't be ended without its process. A separate process gets signals, ends by itself, and is like one
that `accelerate launch` starts.
"""

import os
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from accel_fsdp import python_child
from accel_fsdp.errors import UserError
from accel_fsdp.launch import child_process
from accel_fsdp.launch.on_ray import actor

POLL_SECONDS = 0.5
TAIL_LINES = 10
"""Lines of a failed rank's stderr in the error that Ray shows."""
RANK = "accel_fsdp.launch.on_ray.rank"
_kept: list[Any] = []
"""The store. It ends with the worker, because ranks may need it after rank 0's process has ended."""


class RankFailed(RuntimeError):
    """Reports a failed rank to Ray, which starts all ranks again, as often as `FailureConfig` says."""


def run_rank(job: Mapping[str, Any]) -> None:
    """Runs the rank of this worker to its end; `job` is the driver's `train_loop_config`.

    Raises:
        RankFailed: it failed, and starting it again may help.
        UserError: this machine doesn't see the job's folder.
    """
    import ray

    rank, messages = ray.train.get_context().get_world_rank(), actor.messages()
    _, exit_code, _ = ray.get(messages.outcome.remote())
    if exit_code is not None:
        return
    signalled = messages.next_signal.remote()
    process = _start(job, _variables(messages))
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    copying = threading.Thread(target=_copy, args=(process.stderr, tail), daemon=True)
    copying.start()
    code = _wait(process, signalled)
    copying.join(POLL_SECONDS)  # a process that the rank left behind may hold the pipe
    if ray.get(messages.ended.remote(rank, code)):
        raise RankFailed(
            f"rank {rank} on {socket.gethostname()} ended with {child_process.described(code)}\n{''.join(tail)}"
        )


def _variables(messages: Any) -> dict[str, str]:
    """The variables that torchrun would set: the rank's place, and the store of rank 0's worker as the agent's."""
    import ray
    from ray.train.collective import broadcast_from_rank_zero
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    context = ray.train.get_context()
    rendezvous = None
    if context.get_world_rank() == 0:
        ray.get(messages.begin.remote(context.get_world_size()))
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun's agent does
        _kept.append(store)
        rendezvous = ray.util.get_node_ip_address(), store.port
    address, port = broadcast_from_rank_zero(rendezvous)
    return {
        "RANK": str(context.get_world_rank()),
        "LOCAL_RANK": str(context.get_local_rank()),
        "GROUP_RANK": str(context.get_node_rank()),
        "WORLD_SIZE": str(context.get_world_size()),
        "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
        "MASTER_ADDR": str(address),
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _start(job: Mapping[str, Any], variables: Mapping[str, str]) -> "subprocess.Popen[str]":
    if not Path(job["folder"]).is_dir():
        raise UserError(
            f"there is no folder {job['folder']} on {socket.gethostname()}",
            why="the workers look there for the YAML and the script",
            fix="start the driver in a folder that all machines see, or: ray job submit --working-dir . -- python FILE",
        )
    words = [str(os.getpid()), job["config_file"], job["script"], *job["arguments"]]
    return subprocess.Popen(
        python_child.module(RANK, *words),
        env={**os.environ, "PYTHONUNBUFFERED": "1", **job["environment"], **variables},
        cwd=Path(job["folder"]),
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )


def _copy(stream: IO[str], tail: deque[str]) -> None:
    """Prints a rank's stderr while it is written, and keeps its end."""
    for line in stream:
        sys.stderr.write(line)
        tail.append(line)


def _wait(process: "subprocess.Popen[str]", signalled: Any) -> int:
    """The rank's exit code, as a shell reports it. The driver's signal is forwarded, once."""
    import ray

    waiting = True
    while True:
        try:
            code = process.wait(POLL_SECONDS)
        except subprocess.TimeoutExpired:
            if waiting and ray.wait([signalled], timeout=0)[0]:
                waiting = False
                process.send_signal(ray.get(signalled))
        else:
            return child_process.exit_code(code)
