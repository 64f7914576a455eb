"""Figures as SVG text: bars of a table, pairs, ranges, lines, stacked areas. Independent of plans. Pure.

Sizes are GiB. `STYLE` goes into the page's style sheet; a part's letter is the class that gives its colour (Okabe and
Ito's, which colour-blind people tell apart). The page gives --ink, --back, --rule, --dim, --limit, --c1, --c2, --c3.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate, groupby, pairwise

from accel_fsdp.units import GIB, about_gib, gib_in_figure, number_in_figure, two_digits

TEXT, LINE = 13, 16
LEFT, BOTTOM = 44, 40
NARROW = 500
CELL = 1000
"""Units of the width of a bar in a table."""
PHASES = 5
"""The most phases with long names; with more, all names are short."""
AROUND_CAPACITY = 1.12
STYLE = """
text{font:13px system-ui,sans-serif;fill:var(--ink)}.name{font-weight:600}
.halo{paint-order:stroke;stroke:var(--back);stroke-width:4px;stroke-linejoin:round}
rect{stroke:var(--back);stroke-width:.75}
.P{fill:#0072b2}.O{fill:#56b4e9}.G{fill:#e69f00}.U{fill:#f0e442}.A{fill:#009e73}.L{fill:#d55e00}.B{fill:#cc79a7}
.W{fill:#999}[class^=on-]{fill:#000}.on-P{fill:#fff}
.capacity{stroke:var(--limit);stroke-width:2;stroke-dasharray:6 4}.cut{fill:var(--limit);stroke:var(--back)}
.whisker{stroke:var(--ink);stroke-width:1.5}
.here,.rung{stroke:var(--rule)}.here{stroke:var(--dim);stroke-dasharray:2 3}
.curve{fill:none;stroke-width:2.5}.curve.c1{stroke:var(--c1)}.curve.c2{stroke:var(--c2)}
.curve.c3{stroke:var(--c3);stroke-dasharray:7 4}.dot{fill:var(--ink)}.dot.c1,.end.c1{fill:var(--c1)}
.dot.c2,.end.c2{fill:var(--c2)}.dot.c3,.end.c3{fill:var(--c3)}
"""
SMALL = 4  # a capacity above this many times the highest value is shown as a word only


@dataclass(frozen=True)
class Part:
    letter: str
    name: str
    gib: float


@dataclass(frozen=True)
class Range:
    """An expected value with its minimum and maximum; a number of any kind."""

    name: str
    expected: float
    least: float
    most: float


@dataclass(frozen=True)
class Curve:
    """A line through points whose x doubles; `style` is its class."""

    name: str
    style: str
    points: Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Capacity:
    name: str
    gib: float

    def top(self, highest: float, above: float = AROUND_CAPACITY) -> float:
        """The end of an axis: a little above the capacity, or above the values if they are far below the capacity."""
        return highest * AROUND_CAPACITY if highest * SMALL < self.gib else self.gib * above


@dataclass(frozen=True)
class Words:
    """The title of a figure, and its content in one sentence for screen readers."""

    title: str
    description: str


def cell_bar(parts: Sequence[Part], capacity: Capacity, top: float) -> str:
    """A stacked bar for a cell of a table, as wide as the cell; a mark at its end if it exceeds `top`."""
    ends = [min(round(end * CELL / top), CELL) for end in accumulate((part.gib for part in parts), initial=0.0)]
    shapes = [
        f'<rect class="{part.letter}" x="{start}" width="{end - start}" height="20"/>'
        for part, (start, end) in zip(parts, pairwise(ends), strict=True)
        if end > start
    ]
    if capacity.gib <= top:
        at = round(capacity.gib * CELL / top)
        shapes.append(f'<line class="capacity" x1="{at}" x2="{at}" y2="20"/>')
    if sum(part.gib for part in parts) > top:
        shapes.append(f'<rect class="cut" x="{CELL - 20}" width="20" height="20"/>')
    sizes = ", ".join(f"{part.name} {number_in_figure(part.gib)}" for part in parts)
    return (
        f'<svg class="bar" role="img" viewBox="0 0 {CELL} 20" preserveAspectRatio="none"><title>{escape(sizes)}</title>'
        f"{''.join(shapes)}</svg>"
    )


def ranges(words: Words, rows: Sequence[Range], width: int) -> str:
    """Bars below each other, as long as the expected value, with a line from the minimum to the maximum."""
    scale = (width - 8) / max(1e-9, *(row.most for row in rows))
    shapes: list[str] = []
    for index, row in enumerate(rows):
        y, note = 44 * index, f"{two_digits(row.expected)} ({two_digits(row.least)} to {two_digits(row.most)})"
        low, high = row.least * scale, row.most * scale
        shapes += [_text(0, y + 14, row.name, style="name"), _text(width - 8, y + 14, note, "end")]
        shapes.append(_rect(0, y + 19, max(row.expected * scale, 1), 19, "O"))
        shapes += [_line(low, y + 28.5, high, y + 28.5, "whisker")]
        shapes += [_line(x, y + 23, x, y + 34, "whisker") for x in (low, high)]
    return _figure(words, width, 44 * len(rows), shapes)


def pairs(words: Words, rows: Sequence[tuple[str, str, float, float]], names: tuple[str, str], width: int) -> str:
    """Two bars for each kind (letter, name), one per training method."""
    scale = (width - 152) / max(1e-9, *(size for row in rows for size in row[2:]))
    shapes: list[str] = []
    for index, (letter, kind, *sizes) in enumerate(rows):
        y = 66 * index
        shapes.append(_text(0, y + 13, kind, style="name"))
        for number, (name, size) in enumerate(zip(names, sizes, strict=True)):
            shapes.append(_rect(0, y + 18 + 19 * number, max(size * scale, 1), 17, letter))
            shapes.append(_text(max(size * scale, 1) + 6, y + 31 + 19 * number, f"{name} {gib_in_figure(size)}"))
    return _figure(words, width, 66 * len(rows) - 6, shapes)


def lines(
    words: Words, curves: Sequence[Curve], capacity: Capacity, here: tuple[int, str], axis: str, width: int
) -> str:
    """Lines on two doubling scales, each named at its end; `here` marks an x with a word."""
    height, right, top = 300, width - 118, 24
    low_x, high_x = _ends([x for curve in curves for x, _ in curve.points])
    low_y, high_y = _ends([capacity.gib, *(y for curve in curves for _, y in curve.points)])
    low_y, high_y = math.floor(low_y), math.ceil(high_y)

    def at(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (math.log2(x) - low_x) / max(high_x - low_x, 1e-9) * (right - LEFT)
        return across, height - BOTTOM - (math.log2(y) - low_y) / max(high_y - low_y, 1) * (height - BOTTOM - top)

    step = -(-(high_y - low_y) // 7) or 1
    shapes = [_grid(at(2**low_x, 2.0**power)[1], right, _label(2.0**power)) for power in range(low_y, high_y + 1, step)]
    ticks = sorted({x for curve in curves for x, _ in curve.points})
    shapes += _ticks([(at(x, 1)[0], _label(x)) for x in ticks], height - BOTTOM)
    x, y = at(here[0], capacity.gib)
    shapes.append(_line(x, top, x, height - BOTTOM, "here"))
    shapes.append(_text(min(max(x, LEFT + 40), right - 40), top - 8, here[1], "middle"))
    shapes.append(_line(LEFT, y, right, y, "capacity"))
    ends = [("", f"GPU: {about_gib(capacity.gib * GIB)}", y)]
    for curve in curves:
        places = [at(*point) for point in curve.points]
        shapes.append(f'<polyline class="curve {curve.style}" points="{_points(places)}"/>')
        shapes += [
            f'<circle class="dot {curve.style}" cx="{x:.1f}" cy="{y:.1f}" r="3"><title>{escape(curve.name)}, '
            f"{value[0]:,}: {gib_in_figure(value[1])}</title></circle>"
            for (x, y), value in zip(places, curve.points, strict=True)
        ]
        ends.append((curve.style, curve.name, places[-1][1]))
    shapes += [_text(right + 8, y + 4, name, style=f"end {style}") for style, name, y in _spread(ends)]
    shapes.append(_text(0, 12, "GiB"))
    shapes.append(_text((LEFT + right) / 2, height - 4, axis, "middle"))
    return _figure(words, width, height, shapes)


def areas(words: Words, samples: Sequence[tuple[str, Mapping[str, float]]], capacity: Capacity, width: int) -> str:
    """Sizes by letter on top of each other over phases, with the highest point named."""
    height, top = 215 if width < NARROW else 320, 12
    totals = [sum(sizes.values()) for _, sizes in samples]
    limit = capacity.top(max(totals), max(1, max(totals) / capacity.gib) * AROUND_CAPACITY)
    counts = [(name, len(list(group))) for name, group in groupby(name for name, _ in samples)]
    places, bounds = _places([count for _, count in counts], width - 8, 1 if width < NARROW else 0.7)

    def at(size: float) -> float:
        return height - BOTTOM - size / limit * (height - BOTTOM - top)

    shapes = [_grid(at(size), width - 8, f"{size:,g}") for size in _round_steps(limit)]
    letters = list(samples[0][1])
    stacks = [[0.0, *accumulate(sizes.values())] for _, sizes in samples]
    for number, letter in enumerate(letters):
        upper = [(x, at(stack[number + 1])) for x, stack in zip(places, stacks, strict=True)]
        lower = [(x, at(stack[number])) for x, stack in zip(places, stacks, strict=True)]
        if any(sizes[letter] for _, sizes in samples):
            shapes.append(f'<polygon class="area {letter}" points="{_points([*upper, *reversed(lower)])}"/>')
    for (name, _), (start, end) in zip(counts, pairwise(bounds), strict=True):
        shapes.append(_line(start, top, start, height - BOTTOM, "rung"))
        for row, word in enumerate(_phase(name, len(counts) > PHASES)):
            is_last = end == bounds[-1]
            x, anchor = (width, "end") if is_last else ((start + end) / 2, "middle")
            shapes.append(_text(x, height - BOTTOM + LINE * (row + 1), word, anchor))
    shapes += _capacity_line(capacity, at(capacity.gib), limit, width - 8)
    peak = max(range(len(totals)), key=totals.__getitem__)
    x, y = places[peak], at(totals[peak])
    shapes.append(f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="4"/>')
    shapes.append(_text(x - 8, y + 4, f"{gib_in_figure(totals[peak])}", "end", "halo"))
    return _figure(words, width, height, shapes)


def losses(words: Words, curves: Sequence[Curve], width: int, axes: tuple[str, str] = ("step", "loss")) -> str:
    """Losses over steps, or the quantities in `axes`, on two linear scales; each curve is named at its end."""
    height, right, top = 320, width - 88, 24
    last = max(1, *(x for curve in curves for x, _ in curve.points))
    finite = [y for curve in curves for _, y in curve.points if math.isfinite(y)]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    steps = _round_steps(max(high - low, high / 20, 1e-6))
    unit = steps[1]
    bottom = math.floor(low / unit) * unit
    rungs = [bottom + unit * number for number in range(max(math.ceil((high - bottom) / unit), 1) + 1)]

    def at(x: float, y: float) -> tuple[float, float]:
        across = LEFT + x / last * (right - LEFT)
        return across, height - BOTTOM - (y - bottom) / (rungs[-1] - bottom) * (height - BOTTOM - top)

    shapes = [_grid(at(0, y)[1], right, f"{y:.6g}") for y in rungs]
    shapes += _ticks([(at(x, bottom)[0], f"{x:,.0f}") for x in _round_steps(last) if x == int(x)], height - BOTTOM)
    ends = []
    for curve in curves:
        places = [at(*point) for point in curve.points if math.isfinite(point[1])]
        shapes.append(f'<polyline class="curve {curve.style}" points="{_points(places)}"/>')
        shapes += [f'<circle class="dot {curve.style}" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>' for x, y in places[-1:]]
        ends += [(curve.style, curve.name, y) for _, y in places[-1:]]
    shapes += [_text(right + 8, y + 4, name, style=f"end {style}") for style, name, y in _spread(ends)]
    shapes.append(_text(0, 12, axes[1]))
    shapes.append(_text((LEFT + right) / 2, height - 4, axes[0], "middle"))
    return _figure(words, width, height, shapes)


def standalone(figure: str) -> str:
    colours = (
        "svg{--ink:#1c1c1c;--dim:#57606a;--back:#fff;--rule:#ddd;--limit:#a40e26;"
        "--c1:#0072b2;--c2:#d55e00;--c3:#009e73;background:#fff}"
    )
    head, rest = figure.split(">", 1)
    return f'{head} xmlns="http://www.w3.org/2000/svg"><style>{colours}{STYLE}</style>{rest}\n'


def _capacity_line(capacity: Capacity, y: float, limit: float, right: float) -> list[str]:
    label = f"{capacity.name}: {about_gib(capacity.gib * GIB)}"
    if capacity.gib > limit:
        return [_text(right, 12, f"{label}, above ↑", "end", "halo")]
    return [_line(LEFT, y, right, y, "capacity"), _text(right, y - 5, label, "end", "halo")]


def _places(counts: Sequence[int], right: float, least: float) -> tuple[list[float], list[float]]:
    """The x of all samples, and the bounds of the phases; short phases get `least` of the longest, for their name."""
    weights = [max(count, least * max(counts)) for count in counts]
    scale = (right - LEFT) / sum(weights)
    bounds = [LEFT + scale * before for before in accumulate(weights, initial=0.0)]
    spread = [
        start + (end - start) * number / max(count - 1, 1)
        for count, (start, end) in zip(counts, pairwise(bounds), strict=True)
        for number in range(count)
    ]
    return spread, bounds


def _phase(name: str, is_short: bool) -> list[str]:
    """A phase's name in at most two lines; short where there are many phases."""
    short_names = {"between": "idle", "optimizer": "step", "forward": "fwd", "backward": "bwd"}
    first, *rest = name.split()
    if not is_short:
        return [first, *rest]
    return [short_names.get(first, first), *(rest[-1:] if "micro-batch" in rest else [])]


def _ends(values: Sequence[float]) -> tuple[float, float]:
    return math.log2(min(values)), math.log2(max(values))


def _label(size: float) -> str:
    return f"{size / 1024:g}k" if size >= 2048 else f"{size:,g}" if size >= 1 else f"1/{1 / size:g}"


def _round_steps(limit: float) -> list[float]:
    """Round numbers from 0 to `limit`, five to ten of them."""
    unit = 10 ** math.floor(math.log10(limit / 4))
    step = unit * max(factor for factor in (1, 2, 5) if unit * factor <= limit / 4)
    return [step * number for number in range(int(limit / step) + 1)]


def _spread(ends: Sequence[tuple[str, str, float]]) -> Iterator[tuple[str, str, float]]:
    """Labels moved down so that none covers another."""
    last = -math.inf
    for style, name, y in sorted(ends, key=lambda end: end[2]):
        last = max(y, last + LINE)
        yield style, name, last


def _ticks(places: Sequence[tuple[float, str]], y: float) -> Iterator[str]:
    """The labels of the x axis, as many as there is room for."""
    last = -math.inf
    for x, name in places:
        if x - last >= 34:
            last = x
            yield _text(x, y + LINE, name, "middle")


def _grid(y: float, right: float, name: str) -> str:
    return _line(LEFT, y, right, y, "rung") + _text(LEFT - 6, y + 4, name, "end")


def _points(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


def _text(x: float, y: float, content: str, anchor: str = "start", style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{style}">{escape(content)}</text>'


def _rect(x: float, y: float, width: float, height: float, style: str) -> str:
    return f'<rect class="{style}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>'


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<line class="{style}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _figure(words: Words, width: int, height: float, shapes: Sequence[str]) -> str:
    label = f"<title>{escape(words.title)}</title><desc>{escape(words.description)}</desc>"
    return f'<svg role="img" class="w{width}" viewBox="0 0 {width} {height:.0f}">{label}{"".join(shapes)}</svg>'
