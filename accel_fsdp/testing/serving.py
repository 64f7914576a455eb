"""A rank for tests: it calls the functions that its parent sends, one after the other, until the parent ends.

`python -c` with `command` starts it, with ends of two pipes. It receives and answers calls through one pipe, and
reports its location through the other, even while a call waits.
"""

import contextlib
import functools
import io
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import spawn
from multiprocessing.connection import Connection
from typing import Any

from accel_fsdp.errors import UserError, in_a_line
from accel_fsdp.launch import python_child
from accel_fsdp.ranks import cpu, hang

GROUP_SECONDS = timedelta(days=1)
"""Seconds that a collective may take: the parent's limit is shorter, and its message says more."""
SERVING = "from accel_fsdp.testing import serving; serving.serve{!r}"


@dataclass(frozen=True)
class Answer:
    """The outcome of a call: a pickled value, the traceback of a failure, or why the call or its answer failed.

    `seconds` is the machine's monotonic clock.
    """

    value: bytes = b""
    error: str = ""
    refusal: UserError | None = None
    seconds: float = field(default_factory=time.monotonic)


def command(calls: Connection, questions: Connection, store: str) -> list[str]:
    """The command that starts a rank with its ends of the pipes; the ranks meet in the file `store`."""
    return python_child.command(SERVING.format((calls.fileno(), questions.fileno(), store)))


def greeting() -> dict[str, Any]:
    """The parent's folder, path and `__main__`, so that a rank can import the same modules."""
    return {name: value for name, value in spawn.get_preparation_data("rank").items() if name != "authkey"}


def serve(calls: int, questions: int, store: str) -> None:
    pipe = Connection(calls)
    watching = threading.Thread(target=_report_places, args=(Connection(questions), threading.get_ident()), daemon=True)
    watching.start()
    with contextlib.suppress(EOFError):
        pipe.send(_join_group(pipe.recv(), store))
        while True:
            pipe.send(_call(pipe.recv_bytes()))


def _report_places(questions: Connection, main: int) -> None:
    """Answers questions about where the rank is, and ends the process when its parent has ended."""
    try:
        while True:
            questions.recv()
            questions.send(hang.location_of(main, caller=__file__))
    except (EOFError, OSError):
        os._exit(1)


def _join_group(preparation: dict[str, Any], store: str) -> Answer:
    import torch.distributed as dist

    try:
        spawn.prepare(preparation)
        cpu.begin_rank()
        cpu.mend_fsdp1()
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", f"file://{store}", timeout=GROUP_SECONDS, rank=rank, world_size=ranks)
    except UserError as error:
        return Answer(refusal=error)
    except BaseException as error:
        return Answer(error=_traceback(error))
    return Answer(pickle.dumps(None))


def _call(call: bytes) -> Answer:
    from accelerate.state import AcceleratorState, GradientState

    try:
        function, args, kwargs = pickle.loads(call)
    except Exception as error:
        return Answer(refusal=_not_imported(error))
    sys.argv = [_file_of(function)]  # as if it were a script
    try:
        value = function(*args, **kwargs)
    except BaseException as error:
        return Answer(error=_traceback(error))
    finally:
        AcceleratorState._reset_state()
        GradientState._reset_state()
    return _answer_with(value)


def _file_of(function: Callable[..., Any]) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(sys.modules.get(getattr(function, "__module__", "")), "__file__", ""))


def _answer_with(value: Any) -> Answer:
    try:
        return Answer(_pickled(value))
    except Exception as error:
        return Answer(refusal=_not_returned(value, error))


def _pickled(value: Any) -> bytes:
    from torch.distributed.tensor import DTensor

    class Pickler(pickle.Pickler):
        def reducer_override(self, part: Any) -> Any:
            if isinstance(part, DTensor):  # it could be sent, but the parent has no process group to read it
                raise TypeError("a DTensor belongs to the process group of the ranks")
            return NotImplemented

    buffer = io.BytesIO()
    Pickler(buffer).dump(value)
    return buffer.getvalue()


def _traceback(error: BaseException) -> str:
    """The traceback as Python prints it, without the frames of this file."""
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def _not_imported(error: Exception) -> UserError:
    return UserError(
        f"the ranks can't import what they are to call: {in_a_line(error)}",
        why="each rank is a separate process, which imports the function by its module's name",
        fix="a function of a module that is on sys.path: pytest's setting pythonpath, or its default import mode",
    )


def _not_returned(value: Any, error: Exception) -> UserError:
    return UserError(
        f"rank {os.environ['RANK']} can't return a value of type {type(value).__name__}: {error}",
        why="what a function returns is pickled, to be read in the test's own process",
        fix="return numbers, text or plain tensors; of a DTensor its full_tensor() or to_local(), "
        "for a model the values to compare",
    )
