"""Runs `accel-fsdp` without what Python lacks on Windows: `python tests/windows.py check FILE`.

POSIX's modules, flags, calls and signals are taken away once the libraries are loaded, which know Windows themselves.
Paths, links and locks stay those of this system.
"""

import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import types
from typing import Any

import filelock
import filelock._unix
import huggingface_hub
import numpy
import questionary
import rich.console
import ruamel.yaml
import xxhash

LOADED = (filelock, huggingface_hub, numpy, questionary, rich, ruamel, xxhash, multiprocessing, tempfile)
MODULES = ("fcntl", "grp", "pty", "pwd", "resource", "termios", "tty")
FLAGS = ("O_APPEND", "O_CREAT", "O_EXCL", "O_RDONLY", "O_RDWR", "O_TRUNC", "O_WRONLY")
"""The flags of os.open that Windows has."""
CALLS = ("fchmod", "fdatasync", "fork", "get_blocking", "getuid", "killpg", "mkfifo", "pread", "preadv", "pwrite")
CALLS += ("sched_getaffinity", "set_blocking", "setsid", "statvfs", "sysconf", "uname")
SIGNALS = ("SIGABRT", "SIGFPE", "SIGILL", "SIGINT", "SIGSEGV", "SIGTERM", "SIG_DFL", "SIG_IGN")
"""The signals that Windows has."""


def take_away() -> None:
    kept = types.ModuleType("os")
    vars(kept).update(vars(os))
    filelock._unix.os = shutil.os = kept  # type: ignore[attr-defined]  # they have other code for Windows
    sys.modules.update(dict.fromkeys(MODULES))  # type: ignore[arg-type]  # an import of None fails
    for name in [name for name in vars(os) if name.startswith("O_") and name not in FLAGS] + [*CALLS]:
        vars(os).pop(name, None)
    alarms = ("alarm", "getitimer", "pthread_sigmask", "setitimer")
    for name in [name for name in vars(signal) if name.startswith("SIG") and name not in SIGNALS] + [*alarms]:
        vars(signal).pop(name, None)
    os.open = without_folders(os.open)
    tempfile._O_TMPFILE_WORKS = False


def without_folders(real: Any) -> Any:
    def opened(path: Any, *words: Any, **named: Any) -> int:
        if os.path.isdir(path):
            raise PermissionError(13, "Permission denied", str(path))
        descriptor: int = real(path, *words, **named)
        return descriptor

    return opened


if __name__ == "__main__":
    take_away()
    from accel_fsdp.cli import main

    main()
