"""Starts processes with the libraries already imported, which take most of the time of a short launch.

A server imports them once and forks a process for each request (Python's own forkserver).
"""

import multiprocessing
import os
import random
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from accel_fsdp.errors import UserError

PRELOAD = "accel_fsdp.rehearsal.preload"


def start_server(folder: Path) -> None:
    """Starts the server, which imports the libraries in the background; its socket is in `folder`.

    Python starts it with `-c`, so that it looks for modules in its current folder: hence `folder`. Forked processes
    return to this process's folder and path.

    Libraries look for GPUs during their import. Without the variable, torch asks CUDA's driver, and then refuses all of
    `torch.cuda` in forked processes ("Cannot re-initialize CUDA in forked subprocess").
    """
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    forkserver.set_forkserver_preload([PRELOAD])
    multiprocessing.current_process()._config["tempdir"] = str(folder)  # type: ignore[attr-defined]
    cwd = os.getcwd()
    os.chdir(folder)
    try:
        forkserver.ensure_running()
    finally:
        os.chdir(cwd)


def start(module: str, words: Sequence[str], environment: Mapping[str, str], log: Path) -> BaseProcess:
    """Runs a module with these words in a new process and session; its output goes to `log`."""
    return _start(_run_module, module, list(words), dict(environment), str(log))


def call(
    function: Callable[..., Any], arguments: Sequence[Any], environment: Mapping[str, str], log: Path
) -> tuple[BaseProcess, Connection]:
    """Calls a function of a module in such a process, which sends what it returns, or the UserError that it raises."""
    receiver, sender = multiprocessing.get_context("forkserver").Pipe(duplex=False)
    process = _start(_send_answer, sender, function, tuple(arguments), dict(environment), str(log))
    sender.close()
    return process, receiver


def _start(target: Callable[..., None], *arguments: Any) -> BaseProcess:
    process = multiprocessing.get_context("forkserver").Process(target=target, args=arguments)
    process.start()
    return process


def _run_module(module: str, words: list[str], environment: dict[str, str], log: str) -> None:
    _begin(environment, log)
    sys.argv = [module, *words]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def _send_answer(
    sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...], environment: dict[str, str], log: str
) -> None:
    _begin(environment, log)
    try:
        answer = function(*arguments)
    except UserError as error:
        answer = error
    sender.send(answer)
    sys.stderr.flush()
    os._exit(0)  # threads of a stream from the hub may still wait


def _begin(environment: dict[str, str], log: str) -> None:
    """Turns the forked process into one that was started with this environment."""
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for number in (1, 2):
        os.dup2(descriptor, number)
    os.environ.clear()
    os.environ.update(environment)
    random.seed()  # otherwise each rank draws the same numbers
    import numpy as np

    np.random.seed()
    multiprocessing.set_start_method(None, force=True)  # Python's default: a forkserver's locks leave names
