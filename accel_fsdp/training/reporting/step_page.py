"""A profiled step as one HTML page, with measured and predicted numbers side by side. Pure."""

from collections.abc import Callable
from html import escape

from accel_fsdp import __version__, html_page, svg
from accel_fsdp.html_page import WIDTHS, figure, section, table
from accel_fsdp.svg import Curve, Words
from accel_fsdp.training.reporting import step_report
from accel_fsdp.training.reporting.step_report import Quantity, StepComparison
from accel_fsdp.units import GIB, KIB, MIB, any_size, any_time

NAMES = ("measured", "predicted")


def page(step: StepComparison) -> str:
    title = f"Step {step.step}, measured and predicted"
    verdict = "".join(f"<p>{escape(line.strip())}</p>" for line in step_report.verdict(step))
    body = (
        f"<header><h1>{escape(title)}</h1><p>{escape(step.title)}. {escape(_summary(step))}</p></header>",
        f'<section class="advice">{verdict}</section>',
        _memory(step),
        _rows(step),
        _time(step),
        _traffic(step),
        _units(step),
        section(
            "What the numbers are",
            "Measured by torch's profiler, predicted by the planner.",
            "<ul>" + "".join(f"<li>{escape(note)}</li>" for note in step.notes) + "</ul>",
        ),
        f"<footer><p>accel-fsdp {__version__}. KiB, MiB and GiB are 1,024 bytes and its powers.</p></footer>",
    )
    return html_page.page(title, step.title, body)


def _summary(step: StepComparison) -> str:
    measured, predicted = step.highest_at
    text = f"At its highest, in the {measured}, {any_size(step.highest.measured)} were allocated"
    if step.highest.predicted is not None:
        text += f"; predicted were {any_size(step.highest.predicted)}, in the {predicted}"
    text += f". The step took {any_time(step.seconds.measured)}"
    return text + (
        f"; predicted were {any_time(step.seconds.predicted)}." if step.seconds.predicted is not None else "."
    )


def _memory(step: StepComparison) -> str:
    top = max(step.highest.measured, step.highest.predicted or 0)
    size, unit = next(
        (size, name) for size, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")) if top >= size or size == KIB
    )
    curves = [_curve(step, name, style, size) for name, style in zip(NAMES, ("c1", "c2"), strict=True)]
    known = step.highest.predicted is not None
    caption = "Both as the allocator counts it, on the first rank." if known else "Measured on the first rank."
    words = Words("Allocated memory over the step", _summary(step))
    drawn = [curve for curve in curves if curve.points]
    return section(
        words.title,
        "From left to right the units in their order, not seconds: for each what it finds, its highest point, and "
        "what it leaves.",
        figure([svg.losses(words, drawn, width, ("unit after unit", unit)) for width in WIDTHS], caption),
    )


def _curve(step: StepComparison, name: str, style: str, size: int) -> Curve:
    points: list[tuple[int, float]] = []
    for place, stretch in enumerate(step.stretches):
        levels = [getattr(pair, name) for pair in (stretch.before_bytes, stretch.peak_bytes, stretch.after_bytes)]
        points += [(3 * place + number, level / size) for number, level in enumerate(levels) if level is not None]
    return Curve(name, style, points)


def _rows(step: StepComparison) -> str:
    timed = step.seconds.predicted is not None
    columns = 1 + timed
    rows = [
        [escape(row.name), *_sizes(row.peak_bytes), *_sizes(row.rise_bytes), *_times(row.seconds)[:columns]]
        for row in step.rows
    ]
    between = [step_report.BETWEEN, *_sizes(step.between), *[""] * (2 + columns)]
    whole = ["the whole step", *_sizes(step.highest), "", "", *_times(step.seconds)[:columns]]
    titles = ("unit", *("highest", "predicted"), *("rises by", "predicted"), *("time", "predicted")[:columns])
    return section(
        "Unit by unit",
        "Layers of one class are one row: the highest point of any of them, how far one goes above what it finds, and "
        "the time of all.",
        table(titles, [between, *rows, whole]),
    )


def _time(step: StepComparison) -> str:
    known = [(row.name, row.seconds) for row in step.rows if row.seconds.predicted is not None]
    if not known:
        return ""
    text = "; ".join(
        f"{name}: {any_time(seconds.measured)}, predicted {any_time(seconds.predicted or 0)}" for name, seconds in known
    )
    rest = sum(row.seconds.measured for row in step.rows if row.seconds.predicted is None)
    words = Words("Time by unit", text)
    bars = [("P", name, seconds.measured, seconds.predicted or 0.0) for name, seconds in known]
    return section(
        words.title,
        f"What nothing is predicted for, such as the norm of the gradients, took {any_time(rest)}.",
        figure(
            [svg.pairs(words, bars, NAMES, width, any_time) for width in WIDTHS], "Of all layers of a class together."
        ),
    )


def _traffic(step: StepComparison) -> str:
    if not step.sent:
        return ""
    rows = [[escape(sent.unit), f"{sent.calls:,}", *_sizes(sent.gathers), *_sizes(sent.reduces)] for sent in step.sent]
    return section(
        "Traffic",
        "What the first rank sends: to gather weights, and to reduce gradients.",
        table(("unit", "calls", "gathers", "predicted", "reduces", "predicted"), rows),
    )


def _units(step: StepComparison) -> str:
    rows = [
        [
            escape(f"{stretch.phase} {stretch.name or stretch.unit}{_number(stretch.micro_batch)}"),
            *_sizes(stretch.before_bytes),
            *_sizes(stretch.peak_bytes),
            *_sizes(stretch.after_bytes),
            *_times(stretch.seconds),
        ]
        for stretch in step.stretches
    ]
    titles = ("stretch", *(cell for title in ("finds", "highest", "leaves", "time") for cell in (title, "predicted")))
    return (
        f"<details><summary>All stretches of the step, in their order</summary>{table(titles, rows, 'wide')}</details>"
    )


def _number(micro_batch: int) -> str:
    return f" ({micro_batch})" if micro_batch > 1 else ""


def _sizes(pair: Quantity) -> list[str]:
    return _cells(pair, any_size)


def _times(pair: Quantity) -> list[str]:
    return _cells(pair, any_time)


def _cells(pair: Quantity, write: Callable[[float], str]) -> list[str]:
    """The measured number and the predicted one."""
    numbers = (pair.measured, pair.predicted)
    return ["" if number is None else f'<data value="{number:.9g}">{write(number)}</data>' for number in numbers]
