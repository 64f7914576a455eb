"""The stacks that a rank leaves when it hangs, fails or is ended: a file per rank, which `accel-fsdp launch` reads."""

import faulthandler
import os
import signal
import sys
import traceback
from functools import cache, partial
from typing import TextIO

from accel_fsdp.launch_environment import LaunchEnvironment


@cache
def file() -> TextIO:
    """The file of this rank; stderr under other launchers."""
    launch = LaunchEnvironment.now()
    if not launch.stacks_folder:
        return sys.stderr
    return open(os.path.join(launch.stacks_folder, f"rank_{launch.rank}"), "a", encoding="utf-8")


def begin() -> None:
    """Lets C code write the stacks when torch aborts this rank, or the launcher ends it with SIGTERM."""
    if LaunchEnvironment.now().stacks_folder:
        faulthandler.enable(file())
        faulthandler.register(signal.SIGTERM, file(), chain=True)
        os.register_at_fork(after_in_child=partial(faulthandler.unregister, signal.SIGTERM))


def write() -> None:
    """Writes the stacks of all threads now, for a signal that Python handles."""
    if LaunchEnvironment.now().stacks_folder:
        faulthandler.dump_traceback(file())


def keep(error: BaseException) -> None:
    """Writes where an error was raised."""
    if LaunchEnvironment.now().stacks_folder:
        traceback.print_exception(error, file=file())
        file().flush()
