"""Tests in separate processes, so that a hang can be ended: pairs of machines, and collectives of all ranks.

`python -m accel_fsdp.launch.doctor.probing '{"task": "pairs", ...}'`
"""

import contextlib
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_fsdp import frames
from accel_fsdp.launch import Address, JsonStore
from accel_fsdp.library_internals import Internal
from accel_fsdp.units import MIB

if TYPE_CHECKING:
    import torch

RELIES_ON = (Internal("torch.distributed.distributed_c10d:_world.group_count"),)
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
"""The collectives that FSDP uses."""
PAIR_SECONDS = 10.0
"""Seconds until a machine that doesn't answer counts as unreachable."""
COLLECTIVE_SECONDS = 20.0
MEASURED_SECONDS = 0.3
"""The approximate duration of each measurement."""
START_SECONDS = 60.0
"""Seconds for a partner's process to import torch on a busy machine; the network's timeout begins after that."""
PINGS = 20
SMALL_BYTES = 1024
"""Bytes of a message that fits into one packet on any network."""
SWEEP = (SMALL_BYTES, 64 * 1024, 512 * 1024, 4 * MIB, 32 * MIB, 64 * MIB)
"""Bytes of messages, which grow until one takes long enough to be measured."""
TCP_COUNTERS = Path("/proc/net/snmp")
SIZES_ON_CPU = (4 * 1024, MIB, 16 * MIB)
SIZES_ON_GPU = (4 * 1024, MIB, 256 * MIB)
REPEATS = 5
LONG_SECONDS = 0.25
"""The longest that a message of a collective's size may take between two machines; a collective sends several."""


@dataclass(frozen=True)
class Task:
    """The task of a process. `number` of `members`: machines for `pairs`, ranks for `collectives`.

    `bytes_per_second`: the bandwidth of the slowest pair. Collectives that would take seconds over it are left out.
    """

    task: str
    address: Address
    number: int
    members: list[int]
    device: str
    bytes_per_second: float = 0.0


@dataclass
class PairResult:
    """A round trip between two machines, as measured by one of them.

    `error` is empty on success. `arrived_bytes`: the size of the largest message that came back whole; `failed_bytes`:
    that of the one that didn't. `segments`: the TCP segments that this machine sent meanwhile, and `resent`: how many
    of them were retransmitted. `waited`: the share of the time in which this process was ready, but had no CPU.
    """

    first: int
    second: int
    latency_seconds: float = 0.0
    bytes_per_second: float = 0.0
    arrived_bytes: int = 0
    failed_bytes: int = 0
    segments: int = 0
    resent: int = 0
    waited: float = 0.0
    error: str = ""

    def with_other(self, other: "PairResult | None") -> "PairResult":
        """Merges the results of both sides: the first one's measurements, the packets of both, and both errors."""
        if other is None:
            return self
        return replace(
            self,
            segments=self.segments + other.segments,
            resent=self.resent + other.resent,
            waited=max(self.waited, other.waited),
            arrived_bytes=max(self.arrived_bytes, other.arrived_bytes),
            failed_bytes=self.failed_bytes or other.failed_bytes,
            error=self.error or other.error,
        )


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
        opposite = zip(circle[:half], reversed(circle[half:]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in opposite if a is not None and b is not None]
        circle = [circle[0], circle[-1], *circle[1:-1]]


def pair_key(first: int, second: int, side: int) -> str:
    """The store's key for the result of the first (`side` 0) or second machine of a pair."""
    return f"pair/{first}-{second}/{side}"


def sizes(on_gpus: bool, bytes_per_second: float) -> list[int]:
    """The sizes at which collectives are measured, given the bandwidth of the slowest pair of machines (0: unknown)."""
    least, *larger = SIZES_ON_GPU if on_gpus else SIZES_ON_CPU
    return [least, *(size for size in larger if not bytes_per_second or size < bytes_per_second * LONG_SECONDS)]


def _wait_for_start(task: Task, store: JsonStore) -> set[int]:
    """Waits until the processes of all members have started, and returns the numbers of those that have."""
    store.put(f"{task.task}/{task.number}/started", True)
    keys = {f"{task.task}/{number}/started": number for number in task.members}
    return {keys[key] for key in store.wait(keys, START_SECONDS)}


def _test_pairs(task: Task, store: JsonStore) -> None:
    present = _wait_for_start(task, store)
    deadline = time.monotonic()
    for pairs in rounds(task.members):
        deadline += 2 * PAIR_SECONDS
        for low, high in (pair for pair in pairs if task.number in pair):
            side, partner = (1, low) if task.number == high else (0, high)
            store.put(f"{pair_key(low, high, side)}/comes", True)
            seconds = deadline - time.monotonic() if partner in present else 0.0
            if store.wait([f"{pair_key(low, high, 1 - side)}/comes"], seconds):
                result = _test_pair(task, store, low, high)
            else:
                result = PairResult(low, high, error=f"machine {partner} did not respond in its test")
            store.put(pair_key(low, high, side), asdict(result))


def _test_pair(task: Task, store: JsonStore, first: int, second: int) -> PairResult:
    import torch.distributed as dist

    result, began = PairResult(first, second), time.monotonic()
    waited, (segments, resent) = frames.delayed_seconds(), _tcp_segments()
    try:
        _join(task, store, f"group/{first}-{second}", int(task.number == second), 2, PAIR_SECONDS)
        try:
            _measure_pair(task.device, result)
        finally:
            dist.destroy_process_group()
    except Exception as error:  # any error of the network is the result
        result.error = str(error) or type(error).__name__
    result.waited = (frames.delayed_seconds() - waited) / (time.monotonic() - began)
    now = _tcp_segments()
    result.segments, result.resent = now[0] - segments, now[1] - resent
    return result


def _tcp_segments() -> tuple[int, int]:
    """TCP segments that this machine has sent and has sent again; 0 where the system doesn't report them."""
    with contextlib.suppress(OSError, ValueError):
        names, values = (line.split() for line in TCP_COUNTERS.read_text().splitlines() if line.startswith("Tcp:"))
        counters = dict(zip(names[1:], values[1:], strict=True))
        return int(counters["OutSegs"]), int(counters["RetransSegs"])
    return 0, 0


def _join(task: Task, store: JsonStore, name: str, rank: int, size: int, seconds: float) -> None:
    import torch
    import torch.distributed as dist

    if task.device != "cpu":
        torch.cuda.set_device(task.device)
    group_store = dist.PrefixStore(name, store.torch_store)  # type: ignore[attr-defined]
    limit = timedelta(seconds=seconds)
    group_store.set_timeout(limit)
    backend = "gloo" if task.device == "cpu" else "nccl"
    try:
        dist.init_process_group(backend, store=group_store, rank=rank, world_size=size, timeout=limit)
    except Exception:
        # torch counts a group that couldn't form, and the count is in the store's names of the next one, where the
        # partner's isn't: they would wait for each other.
        dist.distributed_c10d._world.group_count = 0
        raise


def _measure_pair(device: str, result: PairResult) -> None:
    """Measures the latency in one direction, and the bandwidth with long messages."""
    import torch

    small = torch.zeros(1, device=device)
    _there_and_back(small)
    result.latency_seconds = statistics.median(_there_and_back(small) for _ in range(PINGS)) / 2
    for size in SWEEP:
        result.failed_bytes = size
        data = torch.arange(size // 4, dtype=torch.float32, device=device)
        seconds = torch.tensor([_there_and_back(data) / 2], device=device)
        _there_and_back(seconds, agree=True)  # both ranks stop at the size that rank 0 has chosen
        result.arrived_bytes, result.failed_bytes = size, 0
        if float(seconds) * REPEATS >= MEASURED_SECONDS:
            break
    repeats = REPEATS if float(seconds) < 1 else 1
    took = statistics.median(_there_and_back(data) for _ in range(repeats)) / 2
    result.bytes_per_second = result.arrived_bytes / max(took, 1e-6)


def _there_and_back(sent: "torch.Tensor", agree: bool = False) -> float:
    """The seconds of a round trip from rank 0. The ranks check the content, or with `agree` both keep rank 0's."""
    import torch
    import torch.distributed as dist

    received = torch.empty_like(sent)
    began = time.perf_counter()
    if dist.get_rank() == 0:
        dist.send(sent, 1)
        dist.recv(received, 1)
    else:
        dist.recv(received, 0)
        dist.send(received, 0)
    _finish(sent)
    took = time.perf_counter() - began
    if agree:
        sent.copy_(received)
    elif not torch.equal(received, sent):
        raise RuntimeError("the received data differ from the sent data")
    return took


def _finish(tensor: "torch.Tensor") -> None:
    import torch

    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


@dataclass(frozen=True)
class PreparedCollective:
    """A collective at one size: after `run`, `result` must be `expected`. `factor`: bytes on the bus per byte."""

    run: Callable[[], object]
    result: "torch.Tensor"
    expected: "torch.Tensor"
    factor: float


def _prepare(name: str, count: int, device: str) -> PreparedCollective:
    import torch
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    part = torch.full((count // world,), float(rank), device=device)
    parts = torch.arange(world, device=device).repeat_interleave(len(part)).float()  # the parts of all ranks
    of_others = (world - 1) / world
    if name == "all_gather":
        gathered = torch.empty_like(parts)
        return PreparedCollective(lambda: dist.all_gather_into_tensor(gathered, part), gathered, parts, of_others)
    if name == "reduce_scatter":
        expected = torch.full_like(part, float(rank * world))
        return PreparedCollective(lambda: dist.reduce_scatter_tensor(part, parts), part, expected, of_others)
    data = torch.full((count,), float(rank), device=device)
    if name == "broadcast":
        return PreparedCollective(lambda: dist.broadcast(data, 0), data, torch.zeros_like(data), 1.0)
    expected = torch.full_like(data, world * (world + 1) / 2)
    return PreparedCollective(lambda: dist.all_reduce(data.fill_(rank + 1)), data, expected, 2 * of_others)


def _test_collectives(task: Task, store: JsonStore) -> None:
    import torch.distributed as dist

    name = "the start"
    _wait_for_start(task, store)
    try:
        _join(task, store, "collectives/group", task.number, len(task.members), COLLECTIVE_SECONDS)
        for name in COLLECTIVES:
            store.put(at_key(task.number), name)
            for size in sizes(task.device != "cpu", task.bytes_per_second):
                result = _measure(name, size, _prepare(name, size // 4, task.device))
                if task.number == 0:
                    store.put(collective_key(name, size), asdict(result))
        store.put(done_key(task.number), "")
        dist.destroy_process_group()
    except Exception as error:  # any error of the network is the result
        store.put(done_key(task.number), f"{name}: {error or type(error).__name__}")


def at_key(rank: int) -> str:
    return f"collectives/{rank}/at"


def done_key(rank: int) -> str:
    return f"collectives/{rank}"


def collective_key(name: str, size: int) -> str:
    return f"collectives/{name}/{size}"


def _measure(name: str, size: int, prepared: PreparedCollective) -> CollectiveResult:
    import torch

    durations = []
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        prepared.run()
        _finish(prepared.result)
        durations.append(time.perf_counter() - began)
    if not torch.equal(prepared.result, prepared.expected):
        raise RuntimeError("the result is wrong")
    took = statistics.median(durations[1:])
    return CollectiveResult(name, size, took, prepared.factor * size / took)


def _end_with_parent() -> None:
    """Ends this process when the doctor's process, which holds the other end of stdin, has ended."""
    sys.stdin.read()
    os._exit(1)


def main() -> None:
    fields: dict[str, Any] = json.loads(sys.argv[1])
    task = Task(**{**fields, "address": Address(**fields["address"])})
    threading.Thread(target=_end_with_parent, daemon=True).start()
    store = task.address.open(COLLECTIVE_SECONDS)
    {"pairs": _test_pairs, "collectives": _test_collectives}[task.task](task, store)


if __name__ == "__main__":
    main()
