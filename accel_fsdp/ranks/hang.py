"""Detects a rank that waits for others: in which collective, for how long, and where in the script."""

import faulthandler
import os
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from accel_fsdp import waiting
from accel_fsdp.launch_environment import LaunchEnvironment
from accel_fsdp.ranks import collectives, events, script
from accel_fsdp.waiting import FrameLocation

WATCHES = "accel-fsdp watch"
"""The name of the threads that watch the script, which often read the system's figures about processes."""
EVERY_SECONDS = 1.0
IDLE_SECONDS, COLLECTIVE_SECONDS, OTHER_SECONDS = 3.0, 10.0, 40.0
"""How long a rank may stay on the same lines without computing before it reports that: in a collective where the
machine let each of its threads run at once, in any collective, and in anything else, such as a download."""
BUSY = 0.2
"""The part of a core above which a process counts as computing, or as waiting for a core."""
COLLECTIVES = ("distributed_c10d.py", "_functional_collectives.py")
IN_C = {"_distributed_broadcast_coalesced": "broadcast", "_engine_run_backward": "backward"}
"""Functions in which DDP calls collectives in C++, so that no frame of theirs is on the stack."""


class Location(NamedTuple):
    """The location of a rank: the line of the script, the collective that it waits in, and the stack."""

    line: str
    collective: str
    stack: str

    def __str__(self) -> str:
        return f"waits in {self.collective} at {self.line}" if self.collective else f"is at {self.line}"


def begin() -> None:
    """Starts a thread that watches the main thread."""
    if os.environ.get(events.EVENTS):
        events.report("began")
        folder = Path(os.environ[events.EVENTS])
        if not faulthandler.is_enabled():  # gloo aborts a rank that is sent more bytes than it waits for
            faulthandler.enable(open(folder / f"{LaunchEnvironment.now().rank}{events.ABORTED}", "w"))  # noqa: SIM115
        threading.Thread(target=_watch, args=(threading.get_ident(),), name=WATCHES, daemon=True).start()


def _watch(main: int) -> None:
    place, since, busy, delayed, reported = "", time.monotonic(), 0.0, 0.0, 0
    answered = False
    while True:
        time.sleep(EVERY_SECONDS)
        location = location_of(main)
        if location is None:
            return
        if not answered and events.is_asked():
            answered = True
            events.report("at", **location._asdict())
            collectives.report()
        now, computed, stack = time.monotonic(), computed_seconds(), location.stack
        if stack != place or computed - busy > BUSY * (now - since):
            if reported:
                events.report("went-on")
            place, since, busy, delayed, reported = stack, now, computed, waiting.delayed_seconds(), 0
            continue
        seconds = now - since
        is_long = seconds > (COLLECTIVE_SECONDS if location.collective else OTHER_SECONDS)
        is_idle = (
            location.collective and seconds > IDLE_SECONDS and waiting.delayed_seconds() - delayed <= BUSY * seconds
        )
        if (level := 2 if is_long else int(bool(is_idle))) > reported:
            events.report("still", **location._asdict(), long=is_long)
            reported = level


def location_of(thread: int) -> Location | None:
    """The location of a thread of this process; None if it has ended."""
    stack = waiting.stack_of(thread)
    if not stack:
        return None
    line = script.line_of([(at.code.co_filename, at.line) for at in reversed(stack)])
    shown = [at for at in stack if not script.is_of_watch(at.code.co_filename)]
    return Location(line, _collective(stack), waiting.text_of(shown))


def computed_seconds() -> float:
    """The CPU time of this process and its children, which may tokenize for it."""
    child_times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return time.process_time() + float(sum(child.user + child.system for child in child_times))


def collective_of_error(error: BaseException) -> str:
    """The collective in an error's traceback; empty if there is none."""
    frames = [FrameLocation(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    return _collective(frames[::-1])


def _collective(stack: Sequence[FrameLocation]) -> str:
    """The outermost function of torch's collectives on the stack; empty if there is none."""
    name = in_c = ""
    for frame in stack:
        in_c = in_c or IN_C.get(frame.code.co_name, "")
        if os.path.basename(frame.code.co_filename) in COLLECTIVES:
            name = name if frame.code.co_name in ("wrapper", "wait") else frame.code.co_name
    return name or in_c
