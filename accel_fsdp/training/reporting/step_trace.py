"""Reads a torch profiler's trace of one step: memory and time of each stretch between two marks, and what was sent.

The marks are short ranges that a run puts into the trace where a unit begins (`profiling`). Memory is what the
allocator told the profiler, at each allocation: on GPUs its own total; on CPU, which keeps none, what was alive before
and each change since. Pure.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from accel_fsdp.prediction import by_unit

MARK = "accel-fsdp mark "
MEMORY = "[memory]"
"""How torch's profiler names an allocation or a release."""
BACKEND = re.compile(r"(?:gloo|nccl):")
"""How it names what a backend does on a thread of its own."""
FOR_MODULE = re.compile(r"FSDP::(?:all_gather|post_backward_reduce)(?: \((.*?)\))?(?: \[pg=\d+\])?$")
"""How FSDP2 names what it sends for a module; the model itself has no path."""
CPU, CUDA = 0, 1
"""Its numbers of devices."""
WIDTHS = {"float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2, "long int": 8, "int": 4}
"""Bytes of an element by the names that it gives dtypes; all others have one."""
Kind = Literal["all-gather", "reduce-scatter", "all-reduce"]
KINDS: dict[str, Kind] = {
    **dict.fromkeys(("_allgather_base_", "allgather_", "allgather_into_tensor_coalesced_"), "all-gather"),
    **dict.fromkeys(("_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor_coalesced_"), "reduce-scatter"),
    **dict.fromkeys(("allreduce_", "allreduce_coalesced_"), "all-reduce"),
}
UNITS_TRACK = 0
"""The thread number under which a viewer shows the units: no thread has it."""

Span = Literal["start", "rest", "end"] | by_unit.Phase


@dataclass(frozen=True)
class Mark:
    """A moment of a step. The stretch that begins there is of a `unit` in a `phase` of a micro-batch.

    `name` is the path of its module, `layer` its place among the blocks, None for what is no block.
    """

    number: int
    micro_batch: int
    phase: Span
    unit: str
    name: str = ""
    layer: int | None = None

    @property
    def title(self) -> str:
        return f"{self.phase} {self.name or self.unit}".strip()


@dataclass(frozen=True)
class Measured:
    """What lies between a mark and the next: when it began in the trace, its seconds, and bytes."""

    mark: Mark
    began_us: float
    seconds: float
    before_bytes: int
    peak_bytes: int
    after_bytes: int


@dataclass(frozen=True)
class Collective:
    """One call. `elements` are those of a rank's shard, of an all-reduce all; `ranks` is 0 where the call hides it.

    `modules` are the paths of what it is for, where FSDP2 says so.
    """

    kind: Kind
    elements: int
    element_bytes: int
    ranks: int
    modules: tuple[str, ...] = ()

    def sent_bytes(self, ranks: int) -> float:
        """What one rank sends in a ring of so many."""
        whole = self.elements * self.element_bytes
        if self.kind == "all-reduce":
            return 2 * whole * (ranks - 1) / ranks
        return float(whole * (ranks - 1))


@dataclass(frozen=True)
class StepTrace:
    """A step as it was. `levels` are the allocated bytes after each change, with its time.

    `backend_bytes` is the most that gloo allocated for itself, which is not in the other sizes.
    """

    stretches: tuple[Measured, ...]
    collectives: tuple[Collective, ...]
    levels: tuple[tuple[float, int], ...]
    backend_bytes: int = 0

    @property
    def end_bytes(self) -> int:
        """What is alive after the step."""
        return self.stretches[-1].after_bytes

    @property
    def highest_bytes(self) -> int:
        """The most that was alive at once."""
        return max(one.peak_bytes for one in self.stretches)

    @property
    def seconds(self) -> float:
        return sum(one.seconds for one in self.stretches)


def read(
    trace: Mapping[str, Any], marks: Sequence[Mark], before_bytes: int, seconds: Sequence[float] | None, device: int
) -> StepTrace:
    """Lays the marks over the trace. `before_bytes` were allocated when it began.

    `seconds` are those between the marks as the GPU counted them; None: as the trace has them. `device` is the GPU's
    number, -1 for the CPU.
    """
    events = sorted((one for one in trace["traceEvents"] if "ts" in one), key=lambda one: float(one["ts"]))
    times = _mark_times(events)
    moments, backend = _levels(events, before_bytes, device)
    when = [moment for moment, _ in moments]
    found = []
    for place, (mark, following) in enumerate(pairwise(marks)):
        began, ended = times[mark.number], times[following.number]
        first, last = bisect_right(when, began), bisect_right(when, ended)
        inside = [level for _, level in moments[first - 1 : last]]
        spent = (ended - began) / 1e6 if seconds is None else seconds[place]
        found.append(Measured(mark, began, spent, inside[0], max(inside), inside[-1]))
    return StepTrace(tuple(found), tuple(_collectives(events)), tuple(moments), backend)


def annotated(trace: Mapping[str, Any], step: StepTrace) -> dict[str, Any]:
    """The same trace with the units as ranges on a line of their own, and the allocated bytes as a curve."""
    events = [one for one in trace["traceEvents"] if not str(one.get("name", "")).startswith(MARK)]
    process = next(one["pid"] for one in trace["traceEvents"] if str(one.get("name", "")).startswith(MARK))
    common = {"pid": process, "tid": UNITS_TRACK}
    events.append({"ph": "M", "name": "thread_name", **common, "args": {"name": "units"}})
    for one, following in zip(step.stretches, [*step.stretches[1:], None], strict=True):
        ended = following.began_us if following else one.began_us + one.seconds * 1e6
        size = {"bytes at its highest": one.peak_bytes, "bytes after it": one.after_bytes}
        more = {"micro-batch": one.mark.micro_batch, **size}
        span = {"ts": one.began_us, "dur": ended - one.began_us}
        events.append({"ph": "X", "cat": "unit", "name": one.mark.title, **common, **span, "args": more})
    for moment, level in step.levels[1:]:
        events.append({"ph": "C", "name": "allocated", "pid": process, "ts": moment, "args": {"bytes": level}})
    return {**trace, "traceEvents": events}


def _mark_times(events: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    on_host = (one for one in events if one.get("cat") == "user_annotation" and one["name"].startswith(MARK))
    return {int(one["name"].removeprefix(MARK)): float(one["ts"]) for one in on_host}


def _levels(events: Sequence[Mapping[str, Any]], before_bytes: int, device: int) -> tuple[list[tuple[float, int]], int]:
    """The allocated bytes after each event, from the beginning on; and the most that a backend held for itself."""
    told = [one for one in events if one.get("name") == MEMORY]
    if device >= 0:
        own = [one for one in told if (one["args"]["Device Type"], one["args"]["Device Id"]) == (CUDA, device)]
        totals = [(float(one["ts"]), int(one["args"]["Total Allocated"])) for one in own]
        return [(float("-inf"), before_bytes), *totals], 0
    on_host = [one for one in told if one["args"]["Device Type"] == CPU]
    return _ledger(on_host, before_bytes, _Backend(events))


class _Backend:
    """Tells what gloo allocates: on its threads, and inside of its calls, where it copies what it is given."""

    def __init__(self, events: Sequence[Mapping[str, Any]]) -> None:
        self.threads = {one["tid"] for one in events if BACKEND.match(str(one.get("name", "")))}
        self.calls: dict[Any, list[tuple[float, float]]] = {}
        for one in events:
            if str(one.get("name", "")).startswith("c10d::") and "dur" in one:
                self.calls.setdefault(one["tid"], []).append((float(one["ts"]), float(one["ts"]) + float(one["dur"])))

    def owns(self, event: Mapping[str, Any]) -> bool:
        if event["tid"] in self.threads:
            return True
        calls, when = self.calls.get(event["tid"], []), float(event["ts"])
        place = bisect_right(calls, (when, float("inf"))) - 1
        return place >= 0 and when <= calls[place][1]


def _ledger(
    events: Iterable[Mapping[str, Any]], before_bytes: int, backend: _Backend
) -> tuple[list[tuple[float, int]], int]:
    """What is alive by address. A release of what a backend allocated earlier is none of ours, nor told as such."""
    levels, level, alive = [(float("-inf"), before_bytes)], before_bytes, dict[int, int]()
    theirs, held, most = dict[int, int](), 0, 0
    for one in events:
        size, place = int(one["args"]["Bytes"]), int(one["args"]["Addr"])
        if size > 0:
            level -= alive.pop(place, 0)  # its release went untold: it was on a thread that isn't profiled
            held -= theirs.pop(place, 0)
            if backend.owns(one):
                theirs[place] = size
                held += size
                most = max(most, held)
                continue
            alive[place] = size
            level += size
        elif place in theirs:
            held -= theirs.pop(place)
            continue
        elif place in alive or one["tid"] not in backend.threads:
            alive.pop(place, None)
            level += size
        levels.append((float(one["ts"]), level))
    return levels, most


def _collectives(events: Sequence[Mapping[str, Any]]) -> Iterable[Collective]:
    """The calls with their sizes; of lists of tensors the backend's own range tells the dtype."""
    dtypes = {}
    for one in events:
        if BACKEND.match(str(one.get("name", ""))):
            for dims, dtype in zip(one["args"].get("Input Dims", ()), one["args"].get("Input type", ()), strict=False):
                dtypes[_numel(dims)] = dtype
    named = [one for one in events if FOR_MODULE.match(str(one.get("name", ""))) and "dur" in one]
    for one in events:
        if one.get("cat") != "cpu_op" or not one["name"].startswith("c10d::"):
            continue
        dims, kinds = one["args"].get("Input Dims", []), one["args"].get("Input type", [])
        kind = KINDS.get(one["name"].removeprefix("c10d::"))
        place = 1 if kind == "all-gather" else 0
        if kind is None or len(dims) <= place:
            continue
        sizes = [_numel(each) for each in _each(dims[place])]
        dtype = kinds[place] if kinds[place] in WIDTHS else dtypes.get(sizes[0] if sizes else 0, "")
        width = WIDTHS.get(dtype, 1 if dtype else 4)
        yield Collective(kind, sum(sizes), width, _ranks(kind, dims), _modules(one, named))


def _modules(call: Mapping[str, Any], named: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Those of FSDP2's own range around a call."""
    when = float(call["ts"])
    for one in named:
        if one["tid"] == call["tid"] and float(one["ts"]) <= when <= float(one["ts"]) + float(one["dur"]):
            found = FOR_MODULE.match(one["name"])
            return tuple((found[1] or "").split(", ")) if found else ()
    return ()


def _ranks(kind: Kind, dims: Sequence[Any]) -> int:
    """How many ranks a call is of: the ratio of its whole to a shard, where both are there as one tensor each."""
    whole, shard = (dims[0], dims[1]) if kind == "all-gather" else (dims[1], dims[0])
    plain = kind != "all-reduce" and whole and shard and not isinstance(whole[0], list)
    return _numel(whole) // max(_numel(shard), 1) if plain and not isinstance(shard[0], list) else 0


def _each(dims: Sequence[Any]) -> list[Sequence[Any]]:
    """The shapes of a tensor or of a list of tensors."""
    nested = bool(dims) and isinstance(dims[0], list)
    return [each for one in dims for each in _each(one)] if nested else [dims]


def _numel(dims: Sequence[Any]) -> int:
    total = 1
    for one in dims:
        total *= one if isinstance(one, int) else _numel(one)
    return total
