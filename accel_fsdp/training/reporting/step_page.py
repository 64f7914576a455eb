"""A profiled step as one HTML page: what was measured beside what was predicted. Pure."""

from collections.abc import Callable
from html import escape

from accel_fsdp import __version__, html_page, svg
from accel_fsdp.html_page import WIDTHS, figure, section, table
from accel_fsdp.svg import Curve, Words
from accel_fsdp.training.reporting import step_report
from accel_fsdp.training.reporting.step_report import Quantity, StepComparison
from accel_fsdp.units import GIB, KIB, MIB, any_size, any_time

NAMES = ("measured", "predicted")


def page(found: StepComparison) -> str:
    """The whole page."""
    title = f"Step {found.step}, measured and predicted"
    verdict = "".join(f"<p>{escape(line.strip())}</p>" for line in step_report.verdict(found))
    body = (
        f"<header><h1>{escape(title)}</h1><p>{escape(found.title)}. {escape(_summary(found))}</p></header>",
        f'<section class="advice">{verdict}</section>',
        _memory(found),
        _rows(found),
        _time(found),
        _traffic(found),
        _units(found),
        section(
            "What the numbers are",
            "Measured by torch's profiler, predicted by the planner.",
            "<ul>" + "".join(f"<li>{escape(one)}</li>" for one in found.notes) + "</ul>",
        ),
        f"<footer><p>accel-fsdp {__version__}. KiB, MiB and GiB are 1,024 bytes and its powers.</p></footer>",
    )
    return html_page.page(title, found.title, body)


def _summary(found: StepComparison) -> str:
    measured, predicted = found.highest_at
    said = f"At its highest, in the {measured}, {any_size(found.highest.measured)} were allocated"
    if found.highest.predicted is not None:
        said += f"; predicted were {any_size(found.highest.predicted)}, in the {predicted}"
    said += f". The step took {any_time(found.seconds.measured)}"
    return said + (
        f"; predicted were {any_time(found.seconds.predicted)}." if found.seconds.predicted is not None else "."
    )


def _memory(found: StepComparison) -> str:
    top = max(found.highest.measured, found.highest.predicted or 0)
    size, unit = next(
        (size, name) for size, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")) if top >= size or size == KIB
    )
    curves = [_curve(found, name, style, size) for name, style in zip(NAMES, ("c1", "c2"), strict=True)]
    known = found.highest.predicted is not None
    caption = "Both as the allocator counts it, on the first rank." if known else "Measured on the first rank."
    words = Words("Allocated memory over the step", _summary(found))
    drawn = [one for one in curves if one.points]
    return section(
        words.title,
        "From left to right the units in their order, not seconds: for each what it finds, its highest point, and "
        "what it leaves.",
        figure([svg.losses(words, drawn, width, ("unit after unit", unit)) for width in WIDTHS], caption),
    )


def _curve(found: StepComparison, name: str, style: str, size: int) -> Curve:
    points: list[tuple[int, float]] = []
    for place, one in enumerate(found.stretches):
        levels = [getattr(pair, name) for pair in (one.before_bytes, one.peak_bytes, one.after_bytes)]
        points += [(3 * place + number, level / size) for number, level in enumerate(levels) if level is not None]
    return Curve(name, style, points)


def _rows(found: StepComparison) -> str:
    timed = found.seconds.predicted is not None
    columns = 1 + timed
    rows = [
        [escape(row.name), *_sizes(row.peak_bytes), *_sizes(row.rise_bytes), *_times(row.seconds)[:columns]]
        for row in found.rows
    ]
    between = [step_report.BETWEEN, *_sizes(found.between), *[""] * (2 + columns)]
    whole = ["the whole step", *_sizes(found.highest), "", "", *_times(found.seconds)[:columns]]
    titles = ("unit", *("highest", "predicted"), *("rises by", "predicted"), *("time", "predicted")[:columns])
    return section(
        "Unit by unit",
        "Layers of one class are one row: the highest point of any of them, how far one goes above what it finds, and "
        "the time of all.",
        table(titles, [between, *rows, whole]),
    )


def _time(found: StepComparison) -> str:
    known = [(row.name, row.seconds) for row in found.rows if row.seconds.predicted is not None]
    if not known:
        return ""
    said = "; ".join(
        f"{name}: {any_time(one.measured)}, predicted {any_time(one.predicted or 0)}" for name, one in known
    )
    rest = sum(row.seconds.measured for row in found.rows if row.seconds.predicted is None)
    words = Words("Time by unit", said)
    bars = [("P", name, one.measured, one.predicted or 0.0) for name, one in known]
    return section(
        words.title,
        f"What nothing is predicted for, such as the norm of the gradients, took {any_time(rest)}.",
        figure(
            [svg.pairs(words, bars, NAMES, width, any_time) for width in WIDTHS], "Of all layers of a class together."
        ),
    )


def _traffic(found: StepComparison) -> str:
    if not found.sent:
        return ""
    rows = [[escape(one.unit), f"{one.calls:,}", *_sizes(one.gathers), *_sizes(one.reduces)] for one in found.sent]
    return section(
        "Traffic",
        "What the first rank sends: to gather weights, and to reduce gradients.",
        table(("unit", "calls", "gathers", "predicted", "reduces", "predicted"), rows),
    )


def _units(found: StepComparison) -> str:
    rows = [
        [
            escape(f"{one.phase} {one.name or one.unit}" + (f" ({one.micro_batch})" if one.micro_batch > 1 else "")),
            *_sizes(one.before_bytes),
            *_sizes(one.peak_bytes),
            *_sizes(one.after_bytes),
            *_times(one.seconds),
        ]
        for one in found.stretches
    ]
    titles = ("stretch", *(each for one in ("finds", "highest", "leaves", "time") for each in (one, "predicted")))
    return (
        f"<details><summary>All stretches of the step, in their order</summary>{table(titles, rows, 'wide')}</details>"
    )


def _sizes(pair: Quantity) -> list[str]:
    return _cells(pair, any_size)


def _times(pair: Quantity) -> list[str]:
    return _cells(pair, any_time)


def _cells(pair: Quantity, write: Callable[[float], str]) -> list[str]:
    """The measured number and the predicted one."""
    return [
        "" if one is None else f'<data value="{one:.9g}">{write(one)}</data>' for one in (pair.measured, pair.predicted)
    ]
