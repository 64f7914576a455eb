"""The parent process: starts the ranks, sends them calls, and reports where they wait if they don't answer."""

import contextlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

from accel_fsdp.config import JobConfig, read_config
from accel_fsdp.errors import UsageError, UserError
from accel_fsdp.ranks import Location
from accel_fsdp.rehearsal import Hang, environments, janitor, places, scaled
from accel_fsdp.testing import serving
from accel_fsdp.units import counted

TIMEOUT_SECONDS = 60.0
START_SECONDS = 300.0
"""Seconds that torch may take to load."""
QUESTION_SECONDS = 5.0
"""Seconds that a rank may take to report where it is."""
OTHERS_SECONDS = 0.3
"""Seconds that a failure waits for other ranks, because one of them may have failed first."""
SILENT = Location("an unknown place, such as C code that holds Python's GIL", "", "")


class RankError(Exception):
    """A function failed on a rank; the message holds the rank's traceback."""


@dataclass(frozen=True)
class _Rank:
    """A process, the ends of its pipes, and the file with all that it prints."""

    process: "subprocess.Popen[bytes]"
    calls: Connection
    questions: Connection
    output: Path

    def location(self) -> Location:
        with contextlib.suppress(OSError, EOFError):
            self.questions.send(None)
            if self.questions.poll(QUESTION_SECONDS):
                return self.questions.recv() or SILENT
        return SILENT

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.calls.close()
        self.questions.close()

    @property
    def how_it_ended(self) -> str:
        code = self.process.wait()
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"


class Ranks:
    """Processes in one gloo process group. Call it with a function and its arguments.

    The function runs on each rank and must be importable there, as in a test module; its result must be picklable.
    The ranks' output is printed to this process's stdout afterwards, rank by rank. A failure or a timeout ends the
    processes, as `close` and the end of a `with` do; the next call starts new ones.
    """

    def __init__(
        self,
        processes: int | None = None,
        config_file: str | Path | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        """`config_file`: an Accelerate YAML, which `Accelerator()` on the ranks follows.

        Without `processes` there are two ranks, or four if the YAML shards copies of the model.
        """
        self._job = _scaled(processes, config_file)
        self.processes, self.timeout_seconds = self._job.number("num_processes"), timeout_seconds
        self._has_yaml = config_file is not None
        self._started: list[_Rank] = []
        self._folder = contextlib.ExitStack()

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Returns the function's results, in the order of ranks.

        Raises:
            RankError: it failed on a rank. TimeoutError: the ranks didn't return in time.
            UserError: the call or its results can't be pickled; the ranks keep running.
        """
        __tracebackhide__ = True  # pytest then shows the test's line
        call = _pickled(function, args, kwargs)
        try:
            if not self._started:
                self._start()
            printed = [rank.output.stat().st_size for rank in self._started]
            try:
                for rank in self._started:
                    with contextlib.suppress(OSError):  # a rank that has ended doesn't answer either
                        rank.calls.send_bytes(call)
                answers = self._answers(self.timeout_seconds)
            finally:
                self._show_output(printed)
        except BaseException:
            self.close()
            raise
        return _values(answers)

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the processes and removes their files; does nothing if none run."""
        for rank in self._started:
            rank.end()
        self._started = []
        self._folder.close()

    def _start(self) -> None:
        folder = self._folder.enter_context(janitor.folder())
        config = folder / "fsdp.yaml"
        variables = environments(self._job, config, Path(__file__)) if self._has_yaml else places(self.processes)
        for number, environment in enumerate(variables):
            self._started.append(_started({**environment, **janitor.mark(folder)}, folder, folder / f"{number}.log"))
        try:
            _values(self._answers(START_SECONDS))
        except (RankError, TimeoutError):
            self._show_output([0] * self.processes)
            raise

    def _answers(self, seconds: float) -> list[serving.Answer]:
        __tracebackhide__ = True
        waiting = {rank.calls: number for number, rank in enumerate(self._started)}
        answers: dict[int, serving.Answer] = {}
        ended: list[int] = []
        end = time.monotonic() + seconds
        while waiting and (ready := wait(list(waiting), max(end - time.monotonic(), 0))):
            for pipe in [pipe for pipe in waiting if pipe in ready]:
                number = waiting.pop(pipe)
                try:
                    answers[number] = pipe.recv()
                except (EOFError, OSError):
                    ended.append(number)
            if ended or any(answer.error for answer in answers.values()):
                end = min(end, time.monotonic() + OTHERS_SECONDS)
        if ended:  # ranks that communicated with it failed as a consequence
            raise RankError(f"rank {ended[0]} ended without an answer ({self._started[ended[0]].how_it_ended})")
        failed = [number for number, answer in answers.items() if answer.error]
        if failed:
            first = min(failed, key=lambda number: answers[number].seconds)
            raise RankError(f"rank {first}:\n{answers[first].error}")
        if waiting:
            _values(list(answers.values()))  # a rank that was refused the call is why others wait
            raise self._timeout(sorted(waiting.values()), seconds)
        return [answers[number] for number in sorted(answers)]

    def _timeout(self, waiting: list[int], seconds: float) -> TimeoutError:
        places = {number: self._started[number].location() for number in waiting}
        hang = Hang(places, frozenset(range(self.processes)) - places.keys())
        ranks = ", ".join(map(str, waiting))
        return TimeoutError(f"no answer of rank {ranks} after {seconds:g} s: {hang}\n{hang.stacks}")

    def _show_output(self, printed: list[int]) -> None:
        """Prints each rank's output after the given offset of its file: pytest shows it with the test."""
        for number, (rank, before) in enumerate(zip(self._started, printed, strict=True)):
            if text := rank.output.read_bytes()[before:].decode(errors="replace"):
                sys.stdout.write(f"--- output of rank {number} ---\n{text.rstrip()}\n")


def _scaled(processes: int | None, config_file: str | Path | None) -> JobConfig:
    if processes is not None and processes < 1:
        raise UsageError(f"{processes} processes", why="nothing would run", fix="Ranks(2), or Ranks() for as many")
    if config_file is None:
        return JobConfig({"num_processes": processes or scaled.PROCESSES})
    job = read_config(Path(config_file))[0]
    try:
        scaled.check_own(job, "Accelerator()")
        return scaled.scale(job, processes)[0]
    except scaled.CannotRehearse as error:
        what = f"{config_file} can't run on CPU ranks: {error.what}"
        raise UserError(what, why=error.why, fix=error.fix) from None
    except UsageError as error:
        rank_count = counted(processes or scaled.PROCESSES, "CPU rank")
        fix = "another number of processes, or none: Ranks(config_file=FILE)"
        raise UsageError(f"{config_file} can't run on {rank_count}", why=error.why, fix=fix) from None


def _started(environment: Mapping[str, str], folder: Path, output: Path) -> _Rank:
    """Starts a rank, in a separate session: Ctrl-C reaches only the parent, which ends its ranks."""
    (calls, its_calls), (questions, its_questions) = multiprocessing.Pipe(), multiprocessing.Pipe()
    common = {
        "OMP_NUM_THREADS": "1",  # thread pools of several ranks would compete for the same cores
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONUNBUFFERED": "1",
    }
    with open(output, "wb") as log, its_calls, its_questions:
        process = subprocess.Popen(
            serving.command(its_calls, its_questions, str(folder / "store")),
            env={**common, **environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=(its_calls.fileno(), its_questions.fileno()),
            start_new_session=True,
        )
    calls.send(serving.greeting())
    return _Rank(process, calls, questions, output)


def _pickled(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    __tracebackhide__ = True
    try:
        return pickle.dumps((function, args, kwargs))
    except Exception as error:
        raise UserError(
            f"{_unpicklable(function, args, kwargs)} can't be sent to the ranks: {error}",
            why="a rank is a separate process: it imports the function by its name, and gets the arguments pickled",
            fix="a function that is defined at the top of a module; as its arguments numbers, text, plain tensors",
        ) from None


def _unpicklable(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Names the part of a call that can't be pickled."""
    positional = {f"argument {number}": value for number, value in enumerate(args, start=1)}
    for name, value in {**positional, **kwargs}.items():
        try:
            pickle.dumps(value)
        except Exception:
            return f"{name}, of type {type(value).__name__},"
    return f"the function {getattr(function, '__qualname__', function)}"


def _values(answers: list[serving.Answer]) -> list[Any]:
    """The unpickled results of the ranks. Raises if a rank refused a function or a result."""
    __tracebackhide__ = True
    for answer in answers:
        if answer.refusal:
            raise answer.refusal
    return [pickle.loads(answer.value) for answer in answers]


@pytest.fixture(scope="session")
def fsdp_ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Two ranks for the whole session; with `indirect` parameters another number, or those of a YAML by its path."""
    parameter = getattr(request, "param", None)
    with Ranks(parameter) if parameter is None or isinstance(parameter, int) else Ranks(config_file=parameter) as ranks:
        yield ranks
