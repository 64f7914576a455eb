"""Runs one process with forwarded signals, as torchrun does with its ranks, and describes exit codes."""

import signal
import subprocess
from collections.abc import Mapping, Sequence
from types import FrameType

from accel_fsdp import console

SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1")
"""Signals that torchrun forwards to the ranks, and SLURM's warning, which would otherwise end the launcher alone."""


def forwarded() -> list[str]:
    """The names of the signals to forward, without those that this process was told to ignore, as by nohup or `&`."""
    return [name for name in SIGNALS if signal.getsignal(signal.Signals[name]) is not signal.SIG_IGN]


def say_ignored() -> None:
    """Says that a job of the background can't be ended with SIGINT; nohup's SIGHUP is ignored as asked."""
    if "SIGINT" not in forwarded():
        console.say("accel-fsdp: SIGINT is ignored, as in the background of a shell; kill -TERM ends the job")


def run(command: Sequence[str], variables: Mapping[str, str]) -> int:
    """Runs a command until it ends, and returns its code as Python gives it.

    The process has its own session, so that a signal to the launcher's process group, such as Ctrl-C, reaches it once.
    """
    received: list[int] = []
    started: list[subprocess.Popen[bytes]] = []

    def forward(number: int, _: FrameType | None) -> None:
        received.append(number)
        for process in started:
            process.send_signal(number)

    before = {name: signal.signal(signal.Signals[name], forward) for name in forwarded()}
    try:
        process = subprocess.Popen(command, env=variables, start_new_session=True)
        for number in received:  # signals that arrived while it was being started
            process.send_signal(number)
        started.append(process)
        return process.wait()
    finally:
        for name, handler in before.items():
            signal.signal(signal.Signals[name], handler)


def exit_code(returncode: int) -> int:
    """A process's code as a shell reports it; Python gives a signal as a negative number."""
    return returncode if returncode >= 0 else 128 - returncode


def described(returncode: int) -> str:
    """An exit code, and the signal behind it, in words."""
    code = exit_code(returncode)
    names = {128 + number: number.name for number in signal.Signals}
    return f"exit code {code}" + (f" ({names[code]})" if code in names else "")
