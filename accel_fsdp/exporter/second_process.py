"""A second Python process that runs functions for this one, and ends whenever this one ends.

multiprocessing would run the caller's `__main__` again, and with it the whole of a script without `if __name__ ==
"__main__":`.
"""

import gc
import os
import pickle
import signal
import subprocess
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from accel_fsdp import python_child
from accel_fsdp.errors import UserError, in_a_line

SERVING = "from accel_fsdp.exporter import second_process; second_process.serve({})"


class SecondProcess(Executor):
    """Runs functions of this package one after the other and returns their results; their output is discarded."""

    def __init__(self) -> None:
        self._pipe, child_end = Pipe()
        with child_end:
            self._process = subprocess.Popen(
                python_child.command(SERVING.format(child_end.fileno())),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(child_end.fileno(),),
                start_new_session=True,  # Ctrl-C reaches this process alone, which reports it
            )
        self._asking = ThreadPoolExecutor(1)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        """A future with the answer, or the error that the function raised, after those of earlier requests."""
        return self._asking.submit(self._ask, pickle.dumps((fn, args, kwargs)))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Ends the process at once, without waiting for pending answers, which may take seconds."""
        self._process.kill()
        self._asking.shutdown(cancel_futures=True)
        self._process.wait()
        self._pipe.close()

    def _ask(self, request: bytes) -> Any:
        try:
            self._pipe.send_bytes(request)
            answer, error, stack = self._pipe.recv()
        except (OSError, EOFError) as gone:
            raise _process_ended(self._process.wait()) from gone
        if error is not None:
            raise error from _RemoteTraceback(stack)
        return answer


class _RemoteTraceback(Exception):
    """The traceback from the second process, added to that of an error that is a bug."""


def _process_ended(code: int) -> UserError:
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    return UserError(
        f"the process in which transformers loads the model ended {how}",
        why="it is unknown whether the files belong to the model",
        fix="free some memory and try again: the system kills processes when memory runs out"
        if code == -signal.SIGKILL
        else "--verify bytes checks the files without that process",
    )


def serve(descriptor: int) -> None:
    gc.disable()  # importing transformers creates a million objects, and collecting garbage is a quarter of its time
    pipe, waiting = Connection(descriptor), SimpleQueue[bytes]()
    threading.Thread(target=_read_requests, args=(pipe, waiting), daemon=True).start()
    while True:
        pipe.send_bytes(_answer(waiting.get()))


def _read_requests(pipe: Connection, waiting: "SimpleQueue[bytes]") -> None:
    """Reads requests in a thread, so that this process ends with the parent even while it works."""
    try:
        while True:
            waiting.put(pipe.recv_bytes())
    finally:
        os._exit(0)


def _answer(request: bytes) -> bytes:
    try:
        fn, args, kwargs = pickle.loads(request)
        return pickle.dumps((fn(*args, **kwargs), None, ""))
    except Exception as error:
        stack = traceback.format_exc()
        try:
            answer = pickle.dumps((None, error, stack))
            pickle.loads(answer)  # some errors can be pickled but not unpickled
        except Exception:
            answer = pickle.dumps((None, RuntimeError(in_a_line(error)), stack))
        return answer
