"""Starts processes with the libraries already imported, which take most of the time of a short launch.

A server imports them once and forks a process for each request (Python's own forkserver).
"""

import contextlib
import multiprocessing
import os
import random
import runpy
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path

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
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_become, args=(module, list(words), dict(environment), str(log)))
    process.start()
    return process


def _become(module: str, words: list[str], environment: dict[str, str], log: str) -> None:
    """Turns the forked process into a Python that was started with this module."""
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for number in (1, 2):
        os.dup2(descriptor, number)
    os.environ.clear()
    os.environ.update(environment)
    random.seed()  # otherwise each rank draws the same numbers
    import numpy as np

    np.random.seed()
    sys.argv = [module, *words]
    multiprocessing.set_start_method(None, force=True)  # Python's default: a forkserver's locks leave names
    code = 1
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            sys.stderr.write(f"{ended.code}\n")
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
