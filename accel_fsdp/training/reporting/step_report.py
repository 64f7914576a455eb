"""Compares a measured step with the predicted one, unit by unit: memory, time, traffic, and the largest differences.

Layers of one class share a row. The planner has no prediction of time for an unknown GPU, and none at all for some
models and engines. Pure.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal

from accel_fsdp.hardware import Gpu
from accel_fsdp.launch.ranks import HeldUnit, holding
from accel_fsdp.prediction import Traffic, by_unit
from accel_fsdp.training.reporting.step_trace import Collective, Measured, StepTrace
from accel_fsdp.units import any_size, any_time, counted

BETWEEN, OTHER, GRADIENTS, WHOLE = "between steps", "others", "all gradients", "the whole model"
SHOWN = 6
"""The largest number of differences shown."""
LEAST_SHARE = 0.005
"""The smallest difference that is reported, as a share of the step's peak memory, time or traffic."""
What = Literal["memory", "time", "traffic"]
Write = Callable[[float], str]
Cell = tuple[float | None, Write]
"""A number of a table with the function that puts it into words; None where there is none."""
Row = tuple[str, list[Cell]]


@dataclass(frozen=True)
class Quantity:
    """A measured number and the predicted one, None without a prediction."""

    measured: float
    predicted: float | None = None

    def __sub__(self, other: "Quantity") -> "Quantity":
        measured = self.measured - other.measured
        if self.predicted is None or other.predicted is None:
            return Quantity(measured)
        return Quantity(measured, self.predicted - other.predicted)


def combined(fold: Callable[[Iterable[float]], float], quantities: Iterable[Quantity]) -> Quantity:
    """Combines quantities, such as by sum or maximum; predicted only if each of them is."""
    listed = list(quantities)
    predicted = [quantity.predicted for quantity in listed if quantity.predicted is not None]
    measured = fold(quantity.measured for quantity in listed)
    return Quantity(measured, fold(predicted) if len(predicted) == len(listed) else None)


@dataclass(frozen=True)
class ComparedStretch:
    """A measured stretch of the step with its prediction."""

    micro_batch: int
    phase: str
    unit: str
    name: str
    seconds: Quantity
    before_bytes: Quantity
    peak_bytes: Quantity
    after_bytes: Quantity


@dataclass(frozen=True)
class UnitRow:
    """A unit in a phase, or all layers of a class in all micro-batches: `count` stretches, `ending` in the last one.

    `peak_bytes` is the highest peak of any stretch, `rise_bytes` the largest rise of a stretch above its start,
    `left_bytes` the sum that the stretches of the last micro-batch leave allocated.
    """

    phase: str
    unit: str
    count: int
    ending: int
    seconds: Quantity
    peak_bytes: Quantity
    rise_bytes: Quantity
    left_bytes: Quantity

    @property
    def name(self) -> str:
        """The row's title, such as `forward of 32 x LlamaDecoderLayer`."""
        return self.of(self.count)

    def of(self, count: int) -> str:
        count_text = f"{count} x " if count > 1 else ""
        return f"{self.phase} of {count_text}{self.unit}" if self.phase in ("forward", "backward") else self.unit


@dataclass(frozen=True)
class SentBytes:
    """Bytes that one rank sends in a ring for a unit or a class of units: to gather weights, to reduce gradients."""

    unit: str
    gathers: Quantity
    reduces: Quantity

    @property
    def total(self) -> Quantity:
        return combined(sum, (self.gathers, self.reduces))


@dataclass(frozen=True)
class StepDifference:
    """A difference in words; `share` is relative to the step's highest point, time or traffic."""

    what: What
    unit: str
    text: str
    measured: float
    predicted: float
    share: float


@dataclass(frozen=True)
class Known:
    """The context of a trace. `predicted` is None without a plan; `why_unknown`: why the plan or its time is unknown.

    `units` are the sizes of the shards that FSDP's calls send, `buckets` the bytes of the gradients in DDP's.
    `own_engine`: DeepSpeed sends and updates by itself. `quick_seconds`: the seconds of steps without the profiler.
    """

    predicted: by_unit.UnitSteps | None
    why_unknown: str
    gpu: Gpu | None
    on_gpu: bool
    ranks: int
    units: Sequence[tuple[str, HeldUnit]]
    buckets: Sequence[int]
    own_engine: bool
    quick_seconds: Sequence[float] = ()


@dataclass(frozen=True)
class StepComparison:
    """The whole comparison, and the content of `step.json`. `notes` are sentences on what the numbers include.

    `batches` are the rows and the length of each micro-batch on the first rank.
    """

    step: int
    title: str
    batches: Sequence[tuple[int, int]]
    seconds: Quantity
    highest: Quantity
    highest_at: str
    between: Quantity
    rows: Sequence[UnitRow]
    sent: Sequence[SentBytes]
    stretches: Sequence[ComparedStretch]
    differences: Sequence[StepDifference]
    notes: Sequence[str]

    def numbers(self) -> dict[str, Any]:
        return asdict(self)


def compare(step: int, batches: Sequence[tuple[int, int]], trace: StepTrace, known: Known) -> StepComparison:
    rows, length = largest(batches)
    title = f"{rows} x {length:,} tokens on each of {counted(known.ranks, 'rank')}"
    title += f", {len(batches)} micro-batches" if batches[1:] else ""
    stretches = list(_compare_stretches(trace.stretches, known.predicted))
    folded, sent = list(_rows(stretches)), list(_sent_by_unit(trace.collectives, known))
    between = Quantity(trace.stretches[0].before_bytes, known.predicted.between_bytes if known.predicted else None)
    top = max(stretches, key=lambda stretch: stretch.peak_bytes.measured)
    peaks = [stretch.peak_bytes.predicted for stretch in stretches if stretch.peak_bytes.predicted is not None]
    predicted = [stretch.seconds.predicted for stretch in stretches if stretch.seconds.predicted is not None]
    highest = Quantity(top.peak_bytes.measured, max(peaks, default=None))
    seconds = Quantity(trace.seconds, sum(predicted) if predicted else None)
    differences = _differences(folded, sent, between, highest, seconds)
    large = [difference for difference in differences if difference.share >= LEAST_SHARE]
    return StepComparison(
        step=step,
        title=title,
        batches=batches,
        seconds=seconds,
        highest=highest,
        highest_at=f"{top.phase} of {top.name or top.unit}",
        between=between,
        rows=folded,
        sent=sent,
        stretches=stretches,
        differences=sorted(large, key=lambda difference: -difference.share),
        notes=list(_notes(known, trace, step, batches)),
    )


def largest(batches: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Rows and length of the micro-batch with the most tokens."""
    return max(batches, key=lambda batch: batch[0] * batch[1])


def _compare_stretches(stretches: Sequence[Measured], predicted: by_unit.UnitSteps | None) -> Iterator[ComparedStretch]:
    plan: dict[Any, tuple[float | None, ...]] = {}
    before = predicted.between_bytes if predicted else 0
    if predicted:
        for planned in predicted.stretches:
            planned_key = planned.micro_batch, planned.phase, planned.unit, planned.layer
            plan[planned_key] = planned.seconds, before, planned.peak_bytes, planned.after_bytes
            before = planned.after_bytes
    last = max(stretch.mark.micro_batch for stretch in stretches)
    for stretch in stretches:
        mark = stretch.mark
        number = mark.micro_batch if mark.micro_batch in (1, last) else 2  # the plan has the first, second and last
        key = number, mark.phase, mark.unit, mark.layer
        measured = (stretch.seconds, stretch.before_bytes, stretch.peak_bytes, stretch.after_bytes)
        quantities = map(Quantity, measured, plan.get(key, (None, None, None, None)))
        yield ComparedStretch(mark.micro_batch, mark.phase, mark.unit, mark.name, *quantities)


def _rows(stretches: Sequence[ComparedStretch]) -> Iterator[UnitRow]:
    folded: dict[tuple[str, str], list[ComparedStretch]] = {}
    for stretch in stretches:
        folded.setdefault((stretch.phase, stretch.unit), []).append(stretch)
    last = max(stretch.micro_batch for stretch in stretches)
    for (phase, unit), members in folded.items():
        if phase == "start":
            continue
        ending = [stretch for stretch in members if stretch.micro_batch == last]
        yield UnitRow(
            *(phase, unit, len(members), len(ending)),
            seconds=combined(sum, (stretch.seconds for stretch in members)),
            peak_bytes=combined(max, (stretch.peak_bytes for stretch in members)),
            rise_bytes=combined(max, (stretch.peak_bytes - stretch.before_bytes for stretch in members)),
            left_bytes=combined(sum, (stretch.after_bytes - stretch.before_bytes for stretch in ending)),
        )


# Traffic


def _sent_by_unit(collectives: Sequence[Collective], known: Known) -> Iterator[SentBytes]:
    """Assigns each call to the unit whose shard has its size; units of one size share their calls."""
    sent: dict[str, list[float]] = {}
    for call in collectives:
        owners = _owners(call, known)
        for (name, ranks), units in Counter(owners).items():
            gathers_and_reduces = sent.setdefault(name, [0.0, 0.0])
            gathers_and_reduces[call.kind != "all-gather"] += call.sent_bytes(ranks) * units / len(owners)
    planned = _planned_bytes(known)
    for name in dict.fromkeys((*planned, *sent)):
        unplanned = (None, None) if not planned or name == OTHER else (0.0, 0.0)
        yield SentBytes(name, *map(Quantity, sent.get(name, (0.0, 0.0)), planned.get(name, unplanned)))


def _owners(call: Collective, known: Known) -> list[tuple[str, int]]:
    """The names of the units of a call, each with the ranks of its ring."""
    if call.kind == "all-reduce" and call.elements * call.element_bytes in known.buckets:
        return [(GRADIENTS, known.ranks)]
    if known.own_engine:
        return [(WHOLE, call.ranks or known.ranks)]
    gathers = call.kind == "all-gather"
    owners = [
        (name, unit)
        for name, unit in known.units
        if call.elements == (unit.stored if gathers else unit.trained) and unit.ranks > 1
    ]
    paths = {holding.user_name(path) for path in call.modules}
    owners = [(name, unit) for name, unit in owners if unit.name in paths] or owners
    if call.kind == "all-reduce":  # hybrid sharding reduces each shard over the copies of the model
        return [(name, known.ranks // unit.ranks) for name, unit in owners] or [(OTHER, known.ranks)]
    return [(name, call.ranks or unit.ranks) for name, unit in owners] or [(OTHER, call.ranks or known.ranks)]


def _planned_bytes(known: Known) -> dict[str, tuple[float, float]]:
    """The predicted bytes to gather and to reduce, by unit."""
    if known.predicted is None:
        return {}
    planned = {unit.unit: (_total_bytes(unit.gathers), _total_bytes(unit.reduces)) for unit in known.predicted.sent}
    if known.units:
        return planned
    gathers, reduces = map(sum, zip(*planned.values(), strict=True))
    # DDP's buckets, and what DeepSpeed sends, belong to no unit
    return {WHOLE if known.own_engine else GRADIENTS: (gathers, reduces)} if gathers + reduces else {}


def _total_bytes(sent: Traffic) -> float:
    return sent.intra_bytes + sent.inter_bytes


def unit_names(units: Sequence[HeldUnit], layers: Mapping[str, str], embedding: str) -> list[tuple[str, HeldUnit]]:
    """The planner's name of each FSDP unit. `layers` are classes by path; an adapter's unit is its layer's."""
    outer_units = [unit for unit in units if not _layer(unit.name, layers) and unit.weights]
    ends = {embedding: by_unit.EMBEDDING} if len(outer_units) > 1 else {}
    head = by_unit.HEAD if len(outer_units) > 1 else by_unit.OUTSIDE
    return [(_layer(unit.name, layers) or ends.get(unit.name, head), unit) for unit in units]


def _layer(name: str, layers: Mapping[str, str]) -> str:
    return next((kind for path, kind in layers.items() if name == path or name.startswith(f"{path}.")), "")


# Differences


def _differences(
    rows: Sequence[UnitRow], sent: Sequence[SentBytes], between: Quantity, highest: Quantity, seconds: Quantity
) -> Iterator[StepDifference]:
    yield from _difference("memory", BETWEEN, "between steps there are {}", between, highest.measured)
    for row in rows:
        if row.phase == "forward":  # the memory that it leaves is freed in backward, and would be reported twice
            leaves = f"{row.of(row.ending)} leaves {{}}"
            yield from _difference("memory", row.unit, leaves, row.left_bytes, highest.measured)
        rises = f"{row.of(1)} rises above its start by {{}}"
        yield from _difference("memory", row.unit, rises, row.rise_bytes, highest.measured)
        yield from _difference("time", row.unit, f"{row.name} takes {{}}", row.seconds, seconds.measured)
    total_bytes = sum(max(total.measured, total.predicted or 0) for total in (unit.total for unit in sent))
    for unit in sent:
        for quantity, purpose in ((unit.gathers, "to gather weights"), (unit.reduces, "to reduce gradients")):
            yield from _difference("traffic", unit.unit, f"{unit.unit} sends {{}} {purpose}", quantity, total_bytes)


def _difference(what: What, unit: str, text: str, quantity: Quantity, total_bytes: float) -> Iterator[StepDifference]:
    """Yields a difference, if there is a prediction. `text` has a placeholder for the measured number."""
    if quantity.predicted is not None and total_bytes:
        write: Write = any_time if what == "time" else any_size
        excess = quantity.measured - quantity.predicted
        direction = "more" if excess > 0 else "less"
        sentence = f"{text.format(write(quantity.measured))}, {write(abs(excess))} {direction} than predicted"
        yield StepDifference(what, unit, sentence, quantity.measured, quantity.predicted, abs(excess) / total_bytes)


def _notes(known: Known, trace: StepTrace, step: int, batches: Sequence[tuple[int, int]]) -> Iterator[str]:
    """Notes: the prediction's assumptions, the limits of the measurement, and the profiler's overhead."""
    if known.predicted is None:
        yield f"Nothing is predicted: {known.why_unknown}."
    elif known.gpu is None:
        yield f"No time is predicted: {known.why_unknown}."
    else:
        yield f"Time is predicted for {known.gpu.name}, without the profiler, which makes a step longer."
    if known.predicted is not None and not known.on_gpu:
        yield (
            "Predicted sizes are those of CUDA's kernels, without cuBLAS's workspaces. On CPU attention and dropout "
            "use other kernels, which keep other tensors for backward."
        )
    if trace.backend_bytes:
        yield (
            f"gloo copies what it sends; its copies, {any_size(trace.backend_bytes)} at most, are not in the sizes. "
            "Its threads release what was gathered a little late, by chance, so that a size may hold a unit more."
        )
    if known.own_engine:
        yield "DeepSpeed reduces, clips and updates inside of backward: it is part of backward's last unit here."
    if known.predicted is not None and len(set(batches)) > 1:
        yield "The micro-batches differ in length; all are predicted as large as the largest."
    if known.predicted is not None and step == 1:
        yield "Step 1 is measured while the optimizer's states are made; a later one is predicted."
    if trace.collectives:
        yield "The sent bytes are computed from the sizes of the calls, for a ring of all their ranks."
    if known.quick_seconds:
        seconds, quick = any_time(trace.seconds), any_time(median(known.quick_seconds))
        yield f"With the profiler the step took {seconds}; the steps before it took {quick} in the median."


# Tables and sentences for the log and the page


def tables(step: StepComparison) -> Iterator[tuple[Sequence[str], list[Row]]]:
    """Titles and rows of the units, and of the traffic."""
    nothing: Cell = (None, any_size)
    rows = [(row.name, [*cells(row.peak_bytes), *cells(row.seconds, any_time)]) for row in step.rows]
    all_cells = [*cells(step.highest), *cells(step.seconds, any_time)]
    units = [(BETWEEN, [*cells(step.between), nothing, nothing]), *rows, ("the whole step", all_cells)]
    yield ("", "highest", "predicted", "time", "predicted"), units
    if step.sent:
        yield ("sent by one rank", "measured", "predicted"), [(unit.unit, cells(unit.total)) for unit in step.sent]


def cells(quantity: Quantity, write: Write = any_size) -> list[Cell]:
    return [(quantity.measured, write), (quantity.predicted, write)]


def verdict(comparison: StepComparison) -> list[str]:
    """The largest differences as sentences, or why there are none to report."""
    if comparison.highest.predicted is None:
        return ["nothing to compare with"]
    texts = [f"  {difference.what}: {difference.text}" for difference in comparison.differences[:SHOWN]]
    no_difference = f"no difference above {LEAST_SHARE:.1%} of the step's memory, time or traffic"
    return ["the largest differences:", *texts] if texts else [no_difference]


def lines(comparison: StepComparison, place: str) -> Iterator[str]:
    """The lines for the log: the tables, and the largest differences."""
    yield f"profile of step {comparison.step}: {comparison.title}"
    for titles, rows in tables(comparison):
        texts = [[name, *("" if number is None else write(number) for number, write in row)] for name, row in rows]
        widths = [max(map(len, column)) for column in zip(titles, *texts, strict=True)]
        for first, *others in (titles, *texts):
            aligned = [text.rjust(width) for text, width in zip(others, widths[1:], strict=True)]
            yield "  ".join([first.ljust(widths[0]), *aligned]).rstrip()
    yield from verdict(comparison)
    yield f"{place}; the traces are beside it"
