"""Ranks of FSDP on the CPU for tests: started once, so that a test costs milliseconds.

In conftest.py: `pytest_plugins = ["accel_fsdp.testing"]`. Then a test calls a function on every rank:

    def held(scale):
        model = fully_shard(nn.Linear(8, 8))
        return scale * sum(p.to_local().numel() for p in model.parameters())

    def test_each_rank_holds_half(fsdp_ranks):
        assert fsdp_ranks(held, 1) == [36, 36]
"""

import contextlib
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

RANKS = 2
TIMEOUT_SECONDS = 60.0
START_SECONDS = 300.0
"""How long torch may take to load."""


class RankError(Exception):
    """A function failed on a rank; the message holds the rank's traceback."""


class Ranks:
    """Processes that are one gloo process group. Call it with a function and its arguments.

    The function runs on each rank and must be importable there, as those of test modules are; what it returns must be
    picklable. After a failure or a timeout the processes are ended; the next call starts new ones.
    """

    def __init__(
        self, processes: int = RANKS, config_file: str | Path | None = None, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> None:
        """`config_file`: an Accelerate YAML; `Accelerator()` on the ranks then does what it says."""
        self.processes, self.timeout_seconds = processes, timeout_seconds
        self._environment = _of_yaml(Path(config_file)) if config_file is not None else {}
        self._started: list[tuple[Any, Connection]] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """What the function returns on each rank, in their order.

        Raises:
            RankError: it failed on one of them. TimeoutError: they didn't return in time.
        """
        try:
            if not self._started:
                self._start()
                self._answers(START_SECONDS)
            for _, pipe in self._started:
                pipe.send((function, args, kwargs))
            return self._answers(self.timeout_seconds)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the processes."""
        for process, pipe in self._started:
            process.kill()
            process.join()
            pipe.close()
        self._started = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _answers(self, seconds: float) -> list[Any]:
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(self._started)}
        answers: dict[int, Any] = {}
        end = time.monotonic() + seconds
        while waiting:
            ready = wait(list(waiting), max(end - time.monotonic(), 0))
            if not ready:
                ranks = ", ".join(map(str, sorted(waiting.values())))
                raise TimeoutError(f"no answer of rank {ranks} after {seconds:g} s")
            for pipe in [pipe for pipe in waiting if pipe in ready]:
                rank = waiting.pop(pipe)
                answers[rank] = _received(rank, pipe)
        return [answers[rank] for rank in sorted(answers)]

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="accel-fsdp-ranks-")
        store = os.path.join(self._folder.name, "store")
        for rank in range(self.processes):
            here, there = context.Pipe()
            given = (there, rank, self.processes, store, self._environment, self.timeout_seconds)
            process = context.Process(target=_serve, args=given, daemon=True)
            with _one_thread():
                process.start()
            there.close()
            self._started.append((process, here))


def _received(rank: int, pipe: Connection) -> Any:
    try:
        answer, error = pipe.recv()
    except EOFError:
        raise RankError(f"rank {rank} ended without an answer") from None
    if error:
        raise RankError(f"rank {rank}:\n{error}")
    return answer


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Each rank computes on one core: several with a pool of threads each take turns on the same ones."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = before or "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]


def _of_yaml(config_file: Path) -> Mapping[str, str]:
    from accel_fsdp.launch import launcher

    return launcher.rank_environment(config_file, Path(__file__))


def _serve(
    pipe: Connection, rank: int, ranks: int, store: str, environment: Mapping[str, str], timeout_seconds: float
) -> None:
    """What a process does: calls what it is sent until the pipe closes."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {**environment, **{name: str(number) for name, number in place.items()}}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # Accelerate looks whether they are there
    from datetime import timedelta

    import torch.distributed as dist

    from accel_fsdp import cpu

    cpu.enable()
    cpu.mend_fsdp1()
    timeout = timedelta(seconds=timeout_seconds)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timeout)
    with contextlib.suppress(EOFError):
        pipe.send((None, ""))
        while True:
            pipe.send(_called(*pipe.recv()))


def _called(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, str]:
    from accelerate.state import AcceleratorState, GradientState

    try:
        answer = function(*args, **kwargs)
    except BaseException:
        return None, traceback.format_exc()
    finally:
        AcceleratorState._reset_state()
        GradientState._reset_state()
    return answer, ""


@pytest.fixture(scope="session")
def fsdp_ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Two ranks for the whole session; with `indirect` parameters another number, or a YAML's path."""
    given = getattr(request, "param", RANKS)
    ranks = Ranks(given) if isinstance(given, int) else Ranks(config_file=given)
    yield ranks
    ranks.close()
