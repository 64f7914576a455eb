"""What runs in processes of its own, so that a hang can be ended: pairs of machines, and collectives of all ranks.

`python -m accel_fsdp.launch.doctor.probing '{"task": "pairs", ...}'`
"""

import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from accel_fsdp.launch import Address, Board
from accel_fsdp.units import MIB

if TYPE_CHECKING:
    import torch

PAIR_SECONDS = 10.0
"""Until a machine that doesn't answer another counts as unreachable."""
COLLECTIVE_SECONDS = 20.0
MEASURED_SECONDS = 0.3
"""About what each measurement takes."""
PINGS, FIRST_BYTES, MOST_BYTES = 20, 64 * 1024, 64 * MIB
SIZES_ON_CPU = (4 * 1024, MIB, 16 * MIB)
SIZES_ON_GPU = (4 * 1024, MIB, 256 * MIB)
REPEATS = 5


@dataclass(frozen=True)
class Task:
    """What a process is to do. `number` of `members`: machines for `pairs`, ranks for `collectives`.

    `turn`: pairs may be measured several times.
    """

    task: str
    address: Address
    number: int
    members: list[int]
    device: str
    turn: int = 0


@dataclass(frozen=True)
class PairResult:
    """One machine sends to another and back. `error` is empty where that went well."""

    one: int
    other: int
    latency_seconds: float = 0.0
    bytes_per_second: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class CollectiveResult:
    """One collective of all ranks; the bandwidth is that of the bus, as nccl-tests defines it."""

    collective: str
    size_bytes: int
    seconds: float
    bytes_per_second: float


def rounds(members: list[int]) -> Iterator[list[tuple[int, int]]]:
    """All pairs, in rounds in which each member has one partner at most: the circle method of tournaments."""
    circle: list[int | None] = [*members, *([None] if len(members) % 2 else [])]
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        faced = zip(circle[:half], reversed(circle[half:]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in faced if a is not None and b is not None]
        circle = [circle[0], circle[-1], *circle[1:-1]]


def pair_key(turn: int, one: int, other: int) -> str:
    """Where the first of them leaves the result."""
    return f"pair/{turn}/{one}-{other}"


def other_key(turn: int, one: int, other: int) -> str:
    """Where the second leaves its error."""
    return f"{pair_key(turn, one, other)}/other"


def sizes(on_gpus: bool) -> tuple[int, ...]:
    """Bytes at which collectives are measured."""
    return SIZES_ON_GPU if on_gpus else SIZES_ON_CPU


def _pairs(task: Task, board: Board) -> None:
    for pairs in rounds(task.members):
        for one, other in pairs:
            if task.number not in (one, other):
                continue
            result = _pair(task, board, one, other)
            if task.number == one or result.error:
                board.put((pair_key if task.number == one else other_key)(task.turn, one, other), asdict(result))


def _pair(task: Task, board: Board, one: int, other: int) -> PairResult:
    import torch.distributed as dist

    try:
        _join(task, board, f"group/{pair_key(task.turn, one, other)}", int(task.number == other), 2, PAIR_SECONDS)
        try:
            return PairResult(one, other, *_measure_pair(task.device))
        finally:
            dist.destroy_process_group()
    except Exception as error:  # whatever the network makes of it is the result
        return PairResult(one, other, error=str(error) or type(error).__name__)


def _join(task: Task, board: Board, name: str, rank: int, size: int, seconds: float) -> None:
    import torch
    import torch.distributed as dist

    if task.device != "cpu":
        torch.cuda.set_device(task.device)
    store = dist.PrefixStore(name, board.store)  # type: ignore[attr-defined]
    limit = timedelta(seconds=seconds)
    store.set_timeout(limit)
    backend = "gloo" if task.device == "cpu" else "nccl"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)


def _measure_pair(device: str) -> tuple[float, float]:
    """Seconds of the shortest way there, and bytes per second of a long one, the median of a few."""
    import torch

    small = torch.zeros(1, device=device)
    _there_and_back(small)
    latency = statistics.median(_there_and_back(small) for _ in range(PINGS)) / 2
    first = torch.arange(FIRST_BYTES // 4, dtype=torch.float32, device=device)
    took = max(_there_and_back(first) / 2, 1e-6)
    wanted = torch.tensor([FIRST_BYTES * MEASURED_SECONDS / (2 * REPEATS * took)], device=device)
    _there_and_back(wanted, agree=True)  # both take the size that the first one has chosen
    size = int(min(max(float(wanted), FIRST_BYTES), MOST_BYTES)) // 4
    big = torch.arange(size, dtype=torch.float32, device=device)
    took = statistics.median(_there_and_back(big) for _ in range(REPEATS)) / 2
    return latency, size * 4 / took


def _there_and_back(sent: "torch.Tensor", agree: bool = False) -> float:
    """Seconds until what rank 0 sends is back; both look whether it is still the same, unless they `agree` on it."""
    import torch
    import torch.distributed as dist

    got = torch.empty_like(sent)
    began = time.perf_counter()
    if dist.get_rank() == 0:
        dist.send(sent, 1)
        dist.recv(got, 1)
    else:
        dist.recv(got, 0)
        dist.send(got, 0)
    _finish(sent)
    took = time.perf_counter() - began
    if agree:
        sent.copy_(got)
    elif not torch.equal(got, sent):
        raise RuntimeError("what arrived is not what was sent")
    return took


def _finish(tensor: "torch.Tensor") -> None:
    import torch

    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


@dataclass(frozen=True)
class Prepared:
    """A collective at one size: `run` it, and `result` is `expected`. `factor`: bus bytes for each byte."""

    run: Callable[[], object]
    result: "torch.Tensor"
    expected: "torch.Tensor"
    factor: float


def _collectives(task: Task, board: Board) -> None:
    import torch.distributed as dist

    name = "the start"
    try:
        _join(task, board, "collectives/group", task.number, len(task.members), COLLECTIVE_SECONDS)
        for name, prepare in COLLECTIVES.items():
            board.put(at_key(task.number), name)
            for size in sizes(task.device != "cpu"):
                result = _measure(name, size, prepare(size // 4, task.device))
                if task.number == 0:
                    board.put(collective_key(name, size), asdict(result))
        board.put(done_key(task.number), "")
        dist.destroy_process_group()
    except Exception as error:  # whatever the network makes of it is the result
        board.put(done_key(task.number), f"{name}: {error or type(error).__name__}")


def at_key(rank: int) -> str:
    """Where a rank says which collective it is in."""
    return f"collectives/{rank}/at"


def done_key(rank: int) -> str:
    """Where a rank says that it is through, or what stopped it."""
    return f"collectives/{rank}"


def collective_key(name: str, size: int) -> str:
    """Where a measurement is left."""
    return f"collectives/{name}/{size}"


def _measure(name: str, size: int, prepared: Prepared) -> CollectiveResult:
    import torch

    times = []
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        prepared.run()
        _finish(prepared.result)
        times.append(time.perf_counter() - began)
    if not torch.equal(prepared.result, prepared.expected):
        raise RuntimeError("the result is wrong")
    took = statistics.median(times[1:])
    return CollectiveResult(name, size, took, prepared.factor * size / took)


def _all_reduce(count: int, device: str) -> Prepared:
    import torch
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    data = torch.empty(count, device=device)
    expected = torch.full_like(data, world * (world + 1) / 2)
    return Prepared(lambda: dist.all_reduce(data.fill_(rank + 1)), data, expected, 2 * (world - 1) / world)


def _all_gather(count: int, device: str) -> Prepared:
    import torch
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    part = torch.full((count // world,), float(rank), device=device)
    whole = torch.empty(len(part) * world, device=device)
    expected = torch.arange(world, device=device).repeat_interleave(len(part)).float()
    return Prepared(lambda: dist.all_gather_into_tensor(whole, part), whole, expected, (world - 1) / world)


def _reduce_scatter(count: int, device: str) -> Prepared:
    import torch
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    part = torch.empty(count // world, device=device)
    whole = torch.arange(world, device=device).repeat_interleave(len(part)).float()  # on each rank the same
    expected = torch.full_like(part, float(rank * world))
    return Prepared(lambda: dist.reduce_scatter_tensor(part, whole), part, expected, (world - 1) / world)


def _broadcast(count: int, device: str) -> Prepared:
    import torch
    import torch.distributed as dist

    data = torch.full((count,), float(dist.get_rank()), device=device)
    return Prepared(lambda: dist.broadcast(data, 0), data, torch.zeros_like(data), 1.0)


COLLECTIVES: dict[str, Callable[[int, str], Prepared]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
}
"""Those that FSDP uses."""


def _end_with_parent() -> None:
    """Ends this process once the doctor's is gone, which holds the other end of stdin."""
    sys.stdin.read()
    os._exit(1)


def main() -> None:
    """Does what the first argument says."""
    given: dict[str, Any] = json.loads(sys.argv[1])
    task = Task(**{**given, "address": Address(**given["address"])})
    threading.Thread(target=_end_with_parent, daemon=True).start()
    board = task.address.open(COLLECTIVE_SECONDS)
    {"pairs": _pairs, "collectives": _collectives}[task.task](task, board)


if __name__ == "__main__":
    main()
