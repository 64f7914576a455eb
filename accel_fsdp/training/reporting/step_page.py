"""A profiled step as one HTML page, with measured and predicted numbers side by side. Pure."""

from collections.abc import Iterable, Sequence
from html import escape

from accel_fsdp import __version__, html_page, svg
from accel_fsdp.html_page import figure, section
from accel_fsdp.svg import Curve, Words
from accel_fsdp.training.reporting import step_report
from accel_fsdp.training.reporting.step_report import Row, StepComparison, Write, cells
from accel_fsdp.units import GIB, KIB, MIB, any_size, any_time


def page(step: StepComparison) -> str:
    title = f"Step {step.step}, measured and predicted"
    verdict = "".join(f"<p>{escape(line.strip())}</p>" for line in step_report.verdict(step))
    notes = "".join(f"<li>{escape(note)}</li>" for note in step.notes)
    units, *sent = (_table(titles, rows) for titles, rows in step_report.tables(step))
    body = (
        f"<header><h1>{escape(title)}</h1><p>{escape(step.title)}. {escape(_summary(step))}</p></header>",
        f'<section class="advice">{verdict}</section>',
        _memory(step),
        section("Unit by unit", "Layers of one class are one row: the highest of them, and the time of all.", units),
        *(
            section("Traffic", "The bytes that the first rank sends, to gather weights and to reduce gradients.", table)
            for table in sent
        ),
        f"<details><summary>All stretches of the step, in their order</summary>{_stretches(step)}</details>",
        section("About the numbers", "Measured by torch's profiler, predicted by the planner.", f"<ul>{notes}</ul>"),
        f"<footer><p>accel-fsdp {__version__}. KiB, MiB and GiB are 1,024 bytes and its powers.</p></footer>",
    )
    return html_page.page(title, step.title, body)


def _summary(step: StepComparison) -> str:
    highest = f"At its highest, in the {step.highest_at}, {any_size(step.highest.measured)} were allocated"
    predicted = step.highest.predicted
    prediction = "" if predicted is None else f"; predicted were {any_size(predicted)} at its highest"
    return f"{highest}{prediction}. The step took {any_time(step.seconds.measured)}."


def _memory(step: StepComparison) -> str:
    top = max(step.highest.measured, step.highest.predicted or 0)
    size, unit = next(pair for pair in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")) if top >= pair[0] or pair[0] == KIB)
    curves = [_curve(step, name, style, size) for name, style in (("measured", "c1"), ("predicted", "c2"))]
    words = Words("Allocated memory over the step", _summary(step))
    shown = [curve for curve in curves if curve.points]
    return section(
        words.title,
        "From left to right the units in their order, not seconds: for each its allocated bytes at the start, at "
        "the peak and at the end.",
        figure(
            lambda width: svg.losses(words, shown, width, ("unit after unit", unit)),
            "As the allocator counts it, on the first rank.",
        ),
    )


def _curve(step: StepComparison, name: str, style: str, size: int) -> Curve:
    points: list[tuple[int, float]] = []
    for index, stretch in enumerate(step.stretches):
        levels = [getattr(pair, name) for pair in (stretch.before_bytes, stretch.peak_bytes, stretch.after_bytes)]
        points += [(3 * index + number, level / size) for number, level in enumerate(levels) if level is not None]
    return Curve(name, style, points)


def _stretches(step: StepComparison) -> str:
    rows: list[Row] = []
    for stretch in step.stretches:
        suffix = f" ({stretch.micro_batch})" if stretch.micro_batch > 1 else ""
        sizes = (stretch.before_bytes, stretch.peak_bytes, stretch.after_bytes)
        numbers = [*(cell for size in sizes for cell in cells(size)), *cells(stretch.seconds, any_time)]
        rows.append((f"{stretch.phase} {stretch.name or stretch.unit}{suffix}", numbers))
    titles = (word for title in ("finds", "highest", "leaves", "time") for word in (title, "predicted"))
    return _table(("stretch", *titles), rows, "wide")


def _table(titles: Sequence[str], rows: Iterable[Row], style: str = "") -> str:
    texts = [[escape(name), *(_text(*cell) for cell in row)] for name, row in rows]
    return html_page.table(titles, texts, style)


def _text(number: float | None, write: Write) -> str:
    return "" if number is None else f'<data value="{number:.9g}">{write(number)}</data>'
