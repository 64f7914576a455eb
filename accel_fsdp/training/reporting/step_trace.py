"""Reads a torch profiler's trace of one step: memory and time of each stretch between two marks, and traffic.

The marks are short ranges that a run puts into the trace where a unit begins (`profiling`). Memory is what the
allocator reports to the profiler at each allocation: on GPUs its total; on CPU, which has none, the live bytes before
and each later change. Pure.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, Literal

from accel_fsdp.prediction import by_unit

MARK = "accel-fsdp mark "
MEMORY = "[memory]"
"""The profiler's name for an allocation or a release."""
BACKEND = re.compile(r"(?:gloo|nccl):")
"""The beginning of its names for a backend's work on a separate thread."""
FOR_MODULE = re.compile(r"FSDP::(?:all_gather|post_backward_reduce)(?: \((.*?)\))?(?: \[pg=\d+\])?$")
"""FSDP2's names for the communication of a module; the model itself has no path."""
CPU, CUDA = 0, 1
"""The profiler's numbers for devices."""
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
    """A moment of a step.

    The following stretch belongs to a `unit` in a `phase` of a micro-batch. `name` is the path of its module, `layer`
    its index among the blocks, None outside blocks.
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
    """The stretch between a mark and the next: its start in the trace, its seconds, and bytes."""

    mark: Mark
    began_us: float
    seconds: float
    before_bytes: int
    peak_bytes: int
    after_bytes: int


@dataclass(frozen=True)
class Collective:
    """One call.

    `elements` counts those of a rank's shard, for an all-reduce all; `ranks` is 0 if the trace doesn't show it.
    `modules` are the paths of its modules, if FSDP2 names them.
    """

    kind: Kind
    elements: int
    element_bytes: int
    ranks: int
    modules: tuple[str, ...] = ()

    def sent_bytes(self, ranks: int) -> float:
        """The bytes that one rank sends in a ring of `ranks`."""
        total_bytes = self.elements * self.element_bytes
        if self.kind == "all-reduce":
            return 2 * total_bytes * (ranks - 1) / ranks
        return float(total_bytes * (ranks - 1))


@dataclass(frozen=True)
class StepTrace:
    """A measured step. `levels` are the allocated bytes after each change, with its time.

    `backend_bytes` is the peak of gloo's own allocations, which the other sizes exclude.
    """

    stretches: tuple[Measured, ...]
    collectives: tuple[Collective, ...]
    levels: tuple[tuple[float, int], ...]
    backend_bytes: int = 0

    @property
    def seconds(self) -> float:
        return sum(stretch.seconds for stretch in self.stretches)


def read(
    trace: Mapping[str, Any], marks: Sequence[Mark], before_bytes: int, seconds: Sequence[float] | None, device: int
) -> StepTrace:
    """Merges the marks into the trace. `before_bytes` were allocated when it began.

    `seconds` are the GPU's times between the marks; None: those of the trace. `device` is the GPU's
    number, -1 for the CPU.
    """
    events = sorted((event for event in trace["traceEvents"] if "ts" in event), key=lambda event: float(event["ts"]))
    times = _mark_times(events)
    moments, backend = _levels(events, before_bytes, device)
    times_us = [moment for moment, _ in moments]
    stretches = []
    for index, (mark, following) in enumerate(pairwise(marks)):
        began, end = times[mark.number], times[following.number]
        first, last = bisect_right(times_us, began), bisect_right(times_us, end)
        levels = [level for _, level in moments[first - 1 : last]]
        duration = (end - began) / 1e6 if seconds is None else seconds[index]
        stretches.append(Measured(mark, began, duration, levels[0], max(levels), levels[-1]))
    return StepTrace(tuple(stretches), tuple(_collectives(events)), tuple(moments), backend)


def annotated(trace: Mapping[str, Any], step: StepTrace) -> dict[str, Any]:
    """The trace with the units as ranges on a separate line, and the allocated bytes as a curve."""
    events = [event for event in trace["traceEvents"] if not str(event.get("name", "")).startswith(MARK)]
    process = next(event["pid"] for event in trace["traceEvents"] if str(event.get("name", "")).startswith(MARK))
    common = {"pid": process, "tid": UNITS_TRACK}
    events.append({"ph": "M", "name": "thread_name", **common, "args": {"name": "units"}})
    for stretch, following in zip(step.stretches, [*step.stretches[1:], None], strict=True):
        end = following.began_us if following else stretch.began_us + stretch.seconds * 1e6
        size = {"bytes at its highest": stretch.peak_bytes, "bytes after it": stretch.after_bytes}
        details = {"micro-batch": stretch.mark.micro_batch, **size}
        span = {"ts": stretch.began_us, "dur": end - stretch.began_us}
        events.append({"ph": "X", "cat": "unit", "name": stretch.mark.title, **common, **span, "args": details})
    for moment, level in step.levels[1:]:
        events.append({"ph": "C", "name": "allocated", "pid": process, "ts": moment, "args": {"bytes": level}})
    return {**trace, "traceEvents": events}


def _mark_times(events: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    on_host = (event for event in events if event.get("cat") == "user_annotation" and event["name"].startswith(MARK))
    return {int(event["name"].removeprefix(MARK)): float(event["ts"]) for event in on_host}


def _levels(events: Sequence[Mapping[str, Any]], before_bytes: int, device: int) -> tuple[list[tuple[float, int]], int]:
    """The allocated bytes after each event, and the peak of a backend's own allocations."""
    changes = [event for event in events if event.get("name") == MEMORY]
    if device >= 0:
        places = [(event["args"]["Device Type"], event["args"]["Device Id"]) for event in changes]
        device_changes = [event for event, place in zip(changes, places, strict=True) if place == (CUDA, device)]
        totals = [(float(event["ts"]), int(event["args"]["Total Allocated"])) for event in device_changes]
        return [(float("-inf"), before_bytes), *totals], 0
    on_host = [event for event in changes if event["args"]["Device Type"] == CPU]
    return _ledger(on_host, before_bytes, _Backend(events))


class _Backend:
    """Recognizes memory that gloo allocates: on its threads, and during its calls, in which it copies its input."""

    def __init__(self, events: Sequence[Mapping[str, Any]]) -> None:
        self.threads = {event["tid"] for event in events if BACKEND.match(str(event.get("name", "")))}
        self.calls: dict[Any, list[tuple[float, float]]] = {}
        for event in events:
            if str(event.get("name", "")).startswith("c10d::") and "dur" in event:
                began = float(event["ts"])
                self.calls.setdefault(event["tid"], []).append((began, began + float(event["dur"])))

    def owns(self, event: Mapping[str, Any]) -> bool:
        if event["tid"] in self.threads:
            return True
        calls, when = self.calls.get(event["tid"], []), float(event["ts"])
        index = bisect_right(calls, (when, float("inf"))) - 1
        return index >= 0 and when <= calls[index][1]


def _ledger(
    events: Iterable[Mapping[str, Any]], before_bytes: int, backend: _Backend
) -> tuple[list[tuple[float, int]], int]:
    """Tracks the allocated bytes by address. A backend's memory is counted separately, with its releases."""
    levels, totals, peak = [(float("-inf"), before_bytes)], {False: before_bytes, True: 0}, 0
    alive: dict[int, tuple[int, bool]] = {}
    for event in events:
        change, address = int(event["args"]["Bytes"]), int(event["args"]["Addr"])
        size, owned = alive.pop(address, (0, False))
        if change > 0:
            totals[owned] -= size  # its release wasn't recorded, because it was on a thread that isn't profiled
            owned = backend.owns(event)
            alive[address] = change, owned
        elif not size and event["tid"] in backend.threads:
            continue
        totals[owned] += change
        peak = max(peak, totals[True])
        if not owned:
            levels.append((float(event["ts"]), totals[False]))
    return levels, peak


def _collectives(events: Sequence[Mapping[str, Any]]) -> Iterator[Collective]:
    """The calls with their sizes; for lists of tensors, the backend's own range has the dtype."""
    dtypes: dict[int, str] = {}
    for event in (event for event in events if BACKEND.match(str(event.get("name", "")))):
        arguments = event["args"]
        for dims, dtype in zip(arguments.get("Input Dims", ()), arguments.get("Input type", ()), strict=False):
            dtypes |= dict.fromkeys(map(prod, _shapes(dims)), dtype)
    module_events = [event for event in events if FOR_MODULE.match(str(event.get("name", ""))) and "dur" in event]
    for event in (event for event in events if event.get("cat") == "cpu_op"):
        kind = KINDS.get(event["name"].removeprefix("c10d::"))
        dims, types = event["args"].get("Input Dims", []), event["args"].get("Input type", [])
        index = 1 if kind == "all-gather" else 0
        if kind is None or len(dims) <= index:
            continue
        sizes = [prod(shape) for shape in _shapes(dims[index])]
        dtype = types[index] if types[index] in WIDTHS else dtypes.get(sizes[0] if sizes else 0, "")
        width = WIDTHS.get(dtype, 1 if dtype else 4)
        yield Collective(kind, sum(sizes), width, _ranks(kind, dims), _modules(event, module_events))


def _modules(call: Mapping[str, Any], module_events: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """The modules that FSDP2's range around a call names."""
    when = float(call["ts"])
    for span in module_events:
        if span["tid"] == call["tid"] and float(span["ts"]) <= when <= float(span["ts"]) + float(span["dur"]):
            match = FOR_MODULE.match(span["name"])
            return tuple((match[1] or "").split(", ")) if match else ()
    return ()


def _ranks(kind: Kind, dims: Sequence[Any]) -> int:
    """The number of ranks of a call: the ratio of the whole to a shard, if both are single tensors; else 0."""
    full, shard = (dims[0], dims[1]) if kind == "all-gather" else (dims[1], dims[0])
    if kind == "all-reduce" or not (full and shard) or isinstance(full[0], list) or isinstance(shard[0], list):
        return 0
    return int(prod(full) // max(prod(shard), 1))


def _shapes(dims: Sequence[Any]) -> list[Sequence[int]]:
    """The shapes of a tensor or of a list of tensors."""
    nested = bool(dims) and isinstance(dims[0], list)
    return [shape for inner in dims for shape in _shapes(inner)] if nested else [dims]
