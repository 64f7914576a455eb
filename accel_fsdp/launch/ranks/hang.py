"""Sees when a rank waits for others: which collective, since when, and where in the script."""

import os
import sys
import threading
import time
import traceback
from types import CodeType, FrameType
from typing import NamedTuple

import psutil

from accel_fsdp.launch.ranks import events, script

EVERY_SECONDS = 1.0
COLLECTIVE_SECONDS, OTHER_SECONDS = 10.0, 40.0
"""How long a rank stands on the same lines, without computing, before that is told: in a collective, and in anything
else, such as a download."""
BUSY = 0.2
"""The part of a core above which a process counts as computing."""
COLLECTIVES = ("distributed_c10d.py", "_functional_collectives.py")
DEBUGGERS = ("bdb.py", "pydevd.py", "pydevd_frame.py")
LIBRARIES = ("torch", "accelerate")
"""What calls collectives for others."""


Place = tuple[tuple[CodeType, int], ...]
"""Of each frame of a stack, the code and the instruction in it."""


class Stand(NamedTuple):
    """Where a rank stands: the line of the script, the collective that it waits in, and the stack."""

    line: str
    collective: str
    stack: str
    caller: str = ""
    """The innermost code that isn't torch's, Accelerate's or Python's own, as file:line in function."""

    def __str__(self) -> str:
        return f"waits in {self.collective} at {self.line}" if self.collective else f"stands at {self.line}"


def begin() -> None:
    """Starts a thread that watches the main one."""
    if os.environ.get(events.EVENTS):
        events.tell("began")
        threading.Thread(target=_watch, args=(threading.get_ident(),), daemon=True).start()


def _watch(main: int) -> None:
    place, since, busy, told = "", time.monotonic(), _computed_seconds(), False
    while True:
        time.sleep(EVERY_SECONDS)
        stand = stand_of(main)
        if stand is None:
            return
        now, computed, here = time.monotonic(), _computed_seconds(), stand.stack
        if here != place or computed - busy > BUSY * (now - since):
            if told:
                events.tell("moved")
            place, since, busy, told = here, now, computed, False
        elif not told and now - since > (COLLECTIVE_SECONDS if stand.collective else OTHER_SECONDS):
            events.tell("still", stack=here, collective=stand.collective, line=stand.line)
            told = True


def stand_of(thread: int, caller: str = "") -> Stand | None:
    """That of a thread of this process; None if it has ended. The stack begins below the last frame of `caller`."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return None
    frames = traceback.extract_stack(frame)
    begins = max((number for number, at in enumerate(frames, start=1) if at.filename == caller), default=0)
    stack = "".join(traceback.format_list(frames[begins:]))
    return Stand(script.line_of_stack(frame), _collective(frame), stack, _caller(frame))


def place_of(thread: int) -> Place:
    """Equal to an earlier one's where a thread of this process still is, or is again, at the same instruction.

    It takes no file and hardly any time, unlike `stand_of`.
    """
    frame, place = sys._current_frames().get(thread), list[tuple[CodeType, int]]()
    while frame:
        place.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(place)


def is_debugged(place: Place) -> bool:
    """Whether a debugger has stopped a thread there."""
    return any(os.path.basename(code.co_filename) in DEBUGGERS for code, _ in place)


def _computed_seconds() -> float:
    """What this process and its children have computed: one that tokenizes in others doesn't stand still."""
    times = [one.cpu_times() for one in psutil.Process().children(recursive=True)]
    return time.process_time() + float(sum(one.user + one.system for one in times))


def _caller(frame: FrameType | None) -> str:
    while frame:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package not in LIBRARIES and (package not in sys.stdlib_module_names or package == "__main__"):
            code = frame.f_code
            path = "/".join(code.co_filename.split(os.sep)[-2:])
            return f"{path}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
    return ""


def _collective(frame: FrameType | None) -> str:
    """The outermost function of torch's collectives on the stack; empty where it waits for something else."""
    found = ""
    while frame:
        if os.path.basename(frame.f_code.co_filename) in COLLECTIVES:
            name = frame.f_code.co_name
            found = found if name in ("wrapper", "wait") else name
        frame = frame.f_back
    return found
