"""Compares a measured step with the predicted one, unit by unit: memory, time, traffic, and the largest differences.

Layers of one class share a row. Predictions are missing where the planner has none: time without a known GPU, and
everything for a model or an engine without a plan. Pure.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any, Literal

from accel_fsdp.hardware import Gpu
from accel_fsdp.launch.ranks import Unit, holding
from accel_fsdp.prediction import Traffic, by_unit
from accel_fsdp.training.reporting.step_trace import Collective, Measured, StepTrace
from accel_fsdp.units import any_size, any_time, counted

BETWEEN, OTHER, GRADIENTS, WHOLE = "between steps", "others", "all gradients", "the whole model"
SHOWN = 6
"""At most so many differences."""
LEAST_SHARE = 0.005
"""Of the step's highest point, time or traffic: smaller differences aren't named."""
NOTED_SHARE = 0.01
What = Literal["memory", "time", "traffic"]


@dataclass(frozen=True)
class Quantity:
    """A measured number and the predicted one, None where there is none."""

    measured: float
    predicted: float | None = None

    @property
    def difference(self) -> float:
        """Measured minus predicted; 0 without a prediction."""
        return 0.0 if self.predicted is None else self.measured - self.predicted


@dataclass(frozen=True)
class UnitRow:
    """A unit in a phase, or all layers of a class in all micro-batches: `count` stretches, `ending` in the last one.

    `peak_bytes` is the highest point of any of them, `rise_bytes` how far one goes above what it finds, the most of
    them, `left_bytes` what those of the last micro-batch leave behind, together.
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
        """Such as `forward of 32 x LlamaDecoderLayer`."""
        several = f"{self.count} x " if self.count > 1 else ""
        return f"{self.phase} of {several}{self.unit}" if self.phase in ("forward", "backward") else self.unit


@dataclass(frozen=True)
class Sent:
    """Bytes that one rank sends for a unit, or a class of units, in a ring: to gather weights, to reduce gradients."""

    unit: str
    calls: int
    gathers: Quantity
    reduces: Quantity

    @property
    def total(self) -> Quantity:
        known = None if self.gathers.predicted is None else self.gathers.predicted + (self.reduces.predicted or 0)
        return Quantity(self.gathers.measured + self.reduces.measured, known)


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
class Shown:
    """A measured stretch with its prediction."""

    micro_batch: int
    phase: str
    unit: str
    name: str
    seconds: Quantity
    before_bytes: Quantity
    peak_bytes: Quantity
    after_bytes: Quantity


@dataclass(frozen=True)
class Known:
    """The context of a trace. `predicted` is None without a plan; `why_unknown` then says why.

    `units` and `buckets` say what the calls of FSDP and DDP carry: a unit's shard, and so many bytes of gradients.
    `own_engine`: DeepSpeed sends and updates by itself.
    """

    predicted: by_unit.UnitSteps | None
    why_unknown: str
    gpu: Gpu | None
    why_no_gpu: str
    on_gpu: bool
    ranks: int
    units: Sequence[tuple[str, Unit]]
    buckets: Sequence[int]
    own_engine: bool


@dataclass(frozen=True)
class StepComparison:
    """The whole comparison. `notes` are sentences on what the numbers include.

    `batches` are the rows and the length of each micro-batch on the first rank.
    """

    step: int
    title: str
    batches: tuple[tuple[int, int], ...]
    seconds: Quantity
    highest: Quantity
    highest_at: tuple[str, str]
    between: Quantity
    rows: tuple[UnitRow, ...]
    sent: tuple[Sent, ...]
    stretches: tuple[Shown, ...]
    differences: tuple[StepDifference, ...]
    notes: tuple[str, ...] = field(default=())

    def numbers(self) -> dict[str, Any]:
        """The content of `step.json`."""
        return asdict(self)


def compare(
    step: int, batches: tuple[tuple[int, int], ...], trace: StepTrace, known: Known, notes: Iterable[str]
) -> StepComparison:
    rows, length = largest(batches)
    title = f"{rows} x {length:,} tokens on each of {counted(known.ranks, 'rank')}"
    title += f", {len(batches)} micro-batches" if batches[1:] else ""
    stretches = tuple(_shown(trace.stretches, known.predicted))
    folded = tuple(_rows(stretches))
    sent = tuple(_sent(trace.collectives, known))
    between = Quantity(trace.stretches[0].before_bytes, known.predicted.between_bytes if known.predicted else None)
    top = max(stretches, key=lambda stretch: stretch.peak_bytes.measured)
    expected = [stretch for stretch in stretches if stretch.peak_bytes.predicted is not None]
    planned = max(expected, key=lambda stretch: stretch.peak_bytes.predicted or 0, default=None)
    highest = Quantity(top.peak_bytes.measured, planned.peak_bytes.predicted if planned else None)
    times = [stretch.seconds.predicted for stretch in expected if stretch.seconds.predicted is not None]
    seconds = Quantity(trace.seconds, sum(times) if times else None)
    return StepComparison(
        *(step, title, batches, seconds, highest, (_at(top), _at(planned) if planned else ""), between),
        *(folded, sent, stretches, tuple(_differences(folded, sent, between, highest, seconds)), tuple(notes)),
    )


def largest(batches: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Rows and length of the micro-batch with the most tokens."""
    return max(batches, key=lambda batch: batch[0] * batch[1])


def _at(stretch: Shown) -> str:
    return f"{stretch.phase} of {stretch.name or stretch.unit}"


def _shown(stretches: Sequence[Measured], predicted: by_unit.UnitSteps | None) -> Iterator[Shown]:
    plan = {_key(stretch): stretch for stretch in predicted.stretches} if predicted else {}
    ends = [predicted.between_bytes, *(stretch.after_bytes for stretch in plan.values())] if predicted else []
    befores = dict(zip(plan, ends, strict=False))
    last = max((stretch.mark.micro_batch for stretch in stretches), default=0)
    for stretch in stretches:
        mark = stretch.mark
        number = mark.micro_batch if mark.micro_batch in (1, last) else 2
        key = (number, mark.phase, mark.unit, mark.layer)
        planned = plan.get(key)
        yield Shown(
            *(mark.micro_batch, mark.phase, mark.unit, mark.name),
            Quantity(stretch.seconds, planned.seconds if planned else None),
            Quantity(stretch.before_bytes, befores.get(key)),
            Quantity(stretch.peak_bytes, planned.peak_bytes if planned else None),
            Quantity(stretch.after_bytes, planned.after_bytes if planned else None),
        )


def _key(stretch: by_unit.Stretch) -> tuple[int, str, str, int | None]:
    return stretch.micro_batch, stretch.phase, stretch.unit, stretch.layer


def _rows(stretches: Sequence[Shown]) -> Iterator[UnitRow]:
    folded: dict[tuple[str, str], list[Shown]] = {}
    for stretch in stretches:
        folded.setdefault((stretch.phase, stretch.unit), []).append(stretch)
    last = max((stretch.micro_batch for stretch in stretches), default=0)
    for (phase, unit), those in folded.items():
        if phase == "start":
            continue
        ending = [stretch for stretch in those if stretch.micro_batch == last]
        yield UnitRow(
            *(phase, unit, len(those), len(ending)),
            _over(sum, (stretch.seconds for stretch in those)),
            _over(max, (stretch.peak_bytes for stretch in those)),
            _over(max, (_minus(stretch.peak_bytes, stretch.before_bytes) for stretch in those)),
            _over(sum, (_minus(stretch.after_bytes, stretch.before_bytes) for stretch in ending)),
        )


def _minus(first: Quantity, second: Quantity) -> Quantity:
    known = None if first.predicted is None or second.predicted is None else first.predicted - second.predicted
    return Quantity(first.measured - second.measured, known)


def _over(fold: Callable[[Iterable[float]], float], quantities: Iterable[Quantity]) -> Quantity:
    """The sum or maximum of quantities; predicted only if each of them is."""
    listed = list(quantities)
    known = [quantity.predicted for quantity in listed if quantity.predicted is not None]
    return Quantity(fold(quantity.measured for quantity in listed), fold(known) if len(known) == len(listed) else None)


# Traffic


def _sent(collectives: Sequence[Collective], known: Known) -> Iterator[Sent]:
    """Assigns each call to the unit whose shard has its size; units of one size share their calls."""
    gathers, reduces, calls = dict[str, float](), dict[str, float](), dict[str, float]()
    for call in collectives:
        owners = _owners(call, known)
        into = gathers if call.kind == "all-gather" else reduces
        for (name, ranks), units in Counter(owners).items():
            share = units / len(owners)
            into[name] = into.get(name, 0) + call.sent_bytes(ranks) * share
            calls[name] = calls.get(name, 0) + share
    planned = _planned(known)
    for name in dict.fromkeys((*planned, *calls)):
        expected = planned.get(name, (None, None) if not planned or name == OTHER else (0.0, 0.0))
        yield Sent(
            *(name, round(calls.get(name, 0))),
            Quantity(gathers.get(name, 0), expected[0]),
            Quantity(reduces.get(name, 0), expected[1]),
        )


def _owners(call: Collective, known: Known) -> list[tuple[str, int]]:
    size = call.elements * call.element_bytes
    if call.kind == "all-reduce" and size in known.buckets:
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
    if call.kind == "all-reduce":  # of hybrid sharding: each shard over the copies of the model
        return [(name, known.ranks // unit.ranks) for name, unit in owners] or [(OTHER, known.ranks)]
    return [(name, call.ranks or unit.ranks) for name, unit in owners] or [(OTHER, call.ranks or known.ranks)]


def _planned(known: Known) -> dict[str, tuple[float, float]]:
    if known.predicted is None:
        return {}
    if not known.units:  # DDP's buckets, and what DeepSpeed sends, belong to no unit
        gathers, reduces = (
            sum(map(_all, parts))
            for parts in zip(*((traffic.gathers, traffic.reduces) for traffic in known.predicted.sent), strict=True)
        )
        return {WHOLE if known.own_engine else GRADIENTS: (gathers, reduces)} if gathers + reduces else {}
    return {traffic.unit: (_all(traffic.gathers), _all(traffic.reduces)) for traffic in known.predicted.sent}


def _all(sent: Traffic) -> float:
    return sent.intra_bytes + sent.inter_bytes


def unit_names(units: Sequence[Unit], layers: Mapping[str, str], embedding: str) -> list[tuple[str, Unit]]:
    """The prediction's name of each of FSDP's units. `layers` are classes by path; an adapter's unit is its layer's."""
    named: list[tuple[str, Unit]] = []
    outside = [unit for unit in units if not _layer(unit.name, layers) and unit.weights]
    for unit in units:
        layer = _layer(unit.name, layers)
        end = by_unit.EMBEDDING if unit.name == embedding else by_unit.HEAD
        named.append((layer or (end if len(outside) > 1 else by_unit.OUTSIDE), unit))
    return named


def _layer(name: str, layers: Mapping[str, str]) -> str:
    return next((kind for path, kind in layers.items() if name == path or name.startswith(f"{path}.")), "")


# What differs


def _differences(
    rows: Sequence[UnitRow], sent: Sequence[Sent], between: Quantity, highest: Quantity, seconds: Quantity
) -> Iterator[StepDifference]:
    """The differences of at least `LEAST_SHARE`, the largest first."""
    differences = [*_of_memory(rows, between, highest), *_of_time(rows, seconds), *_of_traffic(sent)]
    large = [difference for difference in differences if difference.share >= LEAST_SHARE]
    yield from sorted(large, key=lambda difference: -difference.share)


def _of_memory(rows: Sequence[UnitRow], between: Quantity, highest: Quantity) -> Iterator[StepDifference]:
    yield from _difference("memory", BETWEEN, "between steps there are {}", between, highest.measured)
    for row in rows:
        if row.phase == "forward":  # what it leaves goes in backward, and would be told twice
            leaves = f"{replace(row, count=row.ending).name} leaves {{}}"
            yield from _difference("memory", row.unit, leaves, row.left_bytes, highest.measured)
        rises = f"{replace(row, count=1).name} rises above what it finds by {{}}"
        yield from _difference("memory", row.unit, rises, row.rise_bytes, highest.measured)


def _of_time(rows: Sequence[UnitRow], seconds: Quantity) -> Iterator[StepDifference]:
    for row in rows:
        yield from _difference("time", row.unit, f"{row.name} takes {{}}", row.seconds, seconds.measured)


def _of_traffic(sent: Sequence[Sent]) -> Iterator[StepDifference]:
    whole = sum(max(unit.total.measured, unit.total.predicted or 0) for unit in sent)
    for unit in sent:
        for quantity, purpose in ((unit.gathers, "to gather weights"), (unit.reduces, "to reduce gradients")):
            yield from _difference("traffic", unit.unit, f"{unit.unit} sends {{}} {purpose}", quantity, whole)


def _difference(what: What, unit: str, text: str, quantity: Quantity, whole: float) -> Iterator[StepDifference]:
    """Yields nothing without a prediction. `text` has a placeholder for the measured number, `whole` is the step's."""
    if quantity.predicted is not None and whole:
        write = any_time if what == "time" else any_size
        more = "more" if quantity.difference > 0 else "less"
        sentence = f"{text.format(write(quantity.measured))}, {write(abs(quantity.difference))} {more} than predicted"
        share = abs(quantity.difference) / whole
        yield StepDifference(what, unit, sentence, quantity.measured, quantity.predicted, share)


# What is to be said of the numbers


def notes_of(known: Known, trace: StepTrace, step: int, batches: Sequence[tuple[int, int]]) -> Iterator[str]:
    """What the prediction assumes, and what the measured numbers leave out."""
    if known.predicted is None:
        yield f"Nothing is predicted: {known.why_unknown}."
    elif known.gpu is None:
        yield f"No time is predicted: {known.why_no_gpu}."
    else:
        yield f"Time is predicted for {known.gpu.name}, without the profiler, which makes a step longer."
    if known.predicted is not None and not known.on_gpu:
        yield (
            "Predicted sizes are those of CUDA's kernels, without cuBLAS's workspaces. On CPU attention and dropout "
            "run others, which keep other tensors for backward."
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
        yield "What is sent is counted from the sizes of the calls, as a ring of all their ranks sends it."


def cost_of_profiling(seconds: float, quick: Sequence[float], waited: float) -> Iterator[str]:
    """What the profiler costs, and how long nothing was trained before the step."""
    if quick:
        yield (
            f"With the profiler the step took {any_time(seconds)}; the steps before it took {any_time(median(quick))} "
            "in the median."
        )
    yield (
        f"{any_time(waited)} lie between this step and the one before: data, logging, saves, evaluation, and what the "
        "profiler does."
    )


def unaccounted(size: int, highest: float) -> Iterator[str]:
    """A doubt about the measured sizes, where there is one."""
    if abs(size) > NOTED_SHARE * highest:
        yield f"After the step {any_size(abs(size))} {'more' if size > 0 else 'less'} are alive than the trace tells."


# In a terminal


def lines(comparison: StepComparison, place: str) -> Iterator[str]:
    """A table of units, and the largest differences."""
    yield f"profile of step {comparison.step}: {comparison.title}"
    cells = [("", "highest", "predicted", "time", "predicted")]
    cells.append((BETWEEN, *_cells(comparison.between, any_size), "", ""))
    for row in comparison.rows:
        cells.append((row.name, *_cells(row.peak_bytes, any_size), *_cells(row.seconds, any_time)))
    cells.append(("the whole step", *_cells(comparison.highest, any_size), *_cells(comparison.seconds, any_time)))
    yield from _aligned(cells)
    if comparison.sent:
        yield from _aligned(
            [
                ("sent by one rank", "measured", "predicted"),
                *((sent.unit, *_cells(sent.total, any_size)) for sent in comparison.sent),
            ]
        )
    yield from verdict(comparison)
    yield f"{place}; the traces are beside it"


def verdict(comparison: StepComparison) -> list[str]:
    """The largest differences in plain words; or that there is none, or nothing to compare with."""
    if comparison.highest.predicted is None:
        return ["nothing to compare with"]
    texts = [f"{difference.what}: {difference.text}" for difference in comparison.differences[:SHOWN]]
    return (
        ["the largest differences:", *(f"  {difference}" for difference in texts)]
        if texts
        else [f"no difference above {LEAST_SHARE:.1%} of the step's memory, time or traffic"]
    )


def _cells(pair: Quantity, write: Any) -> tuple[str, str]:
    return write(pair.measured), "" if pair.predicted is None else write(pair.predicted)


def _aligned(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    for first, *others in rows:
        yield "  ".join(
            [first.ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(others, widths[1:], strict=True))]
        ).rstrip()
