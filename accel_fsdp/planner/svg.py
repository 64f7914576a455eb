"""Figures as SVG text: bars of a table, stacked areas. Independent of plans. Pure.

Sizes are GiB. `STYLE` goes into the page's style sheet; a part's letter is the class that gives its colour (Okabe and
Ito's, which colour-blind people tell apart). The page gives --ink, --back, --rule, --dim and --limit.
"""

import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

from accel_fsdp.units import GIB, about_gib, gib_in_figure, number_in_figure

LINE, LEFT, BOTTOM, NARROW = 16, 44, 40, 500
CELL = 1000
"""Units of the width of a bar in a table."""
PHASES = 5
"""The most phases with long names; with more, all names are short."""
SHORT_NAMES = {"between": "idle", "optimizer": "step", "forward": "fwd", "backward": "bwd"}
AROUND_CAPACITY = 1.12
SMALL = 4  # a capacity above this many times the highest value is shown as a word only
STYLE = """
text{font:13px system-ui,sans-serif;fill:var(--ink)}
.halo{paint-order:stroke;stroke:var(--back);stroke-width:4px;stroke-linejoin:round}
rect{stroke:var(--back);stroke-width:.75}
.P{fill:#0072b2}.O{fill:#56b4e9}.G{fill:#e69f00}.U{fill:#f0e442}.A{fill:#009e73}.L{fill:#d55e00}.B{fill:#cc79a7}
.W{fill:#999}[class^=on-]{fill:#000}.on-P{fill:#fff}
.capacity{stroke:var(--limit);stroke-width:2;stroke-dasharray:6 4}.cut{fill:var(--limit);stroke:var(--back)}
.rung{stroke:var(--rule)}
.dot{fill:var(--ink)}
"""
COLOURS = "svg{--ink:#1c1c1c;--back:#fff;--rule:#ddd;--limit:#a40e26;background:#fff}"
"""The colours of a figure outside of a page."""


class Words(NamedTuple):
    """The title of a figure, and its content in one sentence for screen readers."""

    title: str
    description: str


class Capacity(NamedTuple):
    name: str
    gib: float

    def top(self, highest: float, above: float = AROUND_CAPACITY) -> float:
        """The end of an axis: a little above the capacity, or above the values if they are far below the capacity."""
        return highest * AROUND_CAPACITY if highest * SMALL < self.gib else self.gib * above


def cell_bar(parts: Sequence[tuple[str, str, float]], capacity: Capacity, top: float) -> str:
    """A stacked bar of (letter, name, GiB) for a cell of a table; a mark at its end if it exceeds `top`."""
    ends = [min(round(end * CELL / top), CELL) for end in accumulate((gib for *_, gib in parts), initial=0.0)]
    shapes = [
        f'<rect class="{letter}" x="{start}" width="{end - start}" height="20"/>'
        for (letter, *_), (start, end) in zip(parts, pairwise(ends), strict=True)
        if end > start
    ]
    if capacity.gib <= top:
        at = round(capacity.gib * CELL / top)
        shapes.append(f'<line class="capacity" x1="{at}" x2="{at}" y2="20"/>')
    if sum(gib for *_, gib in parts) > top:
        shapes.append(f'<rect class="cut" x="{CELL - 20}" width="20" height="20"/>')
    title = f"<title>{escape(', '.join(f'{name} {number_in_figure(gib)}' for _, name, gib in parts))}</title>"
    frame = f'<svg class="bar" role="img" viewBox="0 0 {CELL} 20" preserveAspectRatio="none">'
    return f"{frame}{title}{''.join(shapes)}</svg>"


def areas(words: Words, samples: Sequence[tuple[str, Mapping[str, float]]], capacity: Capacity, width: int) -> str:
    """Sizes by letter on top of each other over equally wide phases, with the highest point named."""
    height, top, right = 215 if width < NARROW else 320, 12, width - 8
    floor = height - BOTTOM
    totals = [sum(sizes.values()) for _, sizes in samples]
    limit = capacity.top(max(totals), max(1, max(totals) / capacity.gib) * AROUND_CAPACITY)
    counts = [(name, len(list(group))) for name, group in groupby(name for name, _ in samples)]
    wide = (right - LEFT) / len(counts)
    places = [
        LEFT + wide * (phase + number / max(count - 1, 1))
        for phase, (_, count) in enumerate(counts)
        for number in range(count)
    ]

    def at(size: float) -> float:
        return floor - size / limit * (floor - top)

    shapes = [_grid(at(size), right, f"{size:,g}") for size in _round_steps(limit)]
    stacks = [[0.0, *accumulate(sizes.values())] for _, sizes in samples]
    edges = [list(zip(places, map(at, heights), strict=True)) for heights in zip(*stacks, strict=True)]
    for letter, (lower, upper) in zip(samples[0][1], pairwise(edges), strict=True):
        if upper != lower:
            shapes.append(f'<polygon class="area {letter}" points="{_points([*upper, *reversed(lower)])}"/>')
    for phase, (name, _) in enumerate(counts):
        start, words_below = LEFT + wide * phase, _phase(name, is_short=len(counts) > PHASES)
        shapes.append(_line(start, top, start, floor, "rung"))
        place = (width, "end") if phase == len(counts) - 1 else (start + wide / 2, "middle")
        for row, word in enumerate(words_below, start=1):
            shapes.append(_text(place[0], floor + LINE * row, word, place[1]))
    label = f"{capacity.name}: {about_gib(capacity.gib * GIB)}"
    if capacity.gib > limit:
        shapes.append(_text(right, 12, f"{label}, above ↑", "end", "halo"))
    else:
        y = at(capacity.gib)
        shapes += [_line(LEFT, y, right, y, "capacity"), _text(right, y - 5, label, "end", "halo")]
    x, y = max(zip(places, map(at, totals), strict=True), key=lambda place: -place[1])
    shapes.append(f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="4"/>')
    shapes.append(_text(x - 8, y + 4, gib_in_figure(max(totals)), "end", "halo"))
    return _figure(words, width, height, shapes)


def standalone(figure: str) -> str:
    """A figure as a file, with its own colours."""
    head, rest = figure.split(">", 1)
    return f'{head} xmlns="http://www.w3.org/2000/svg"><style>{COLOURS}{STYLE}</style>{rest}\n'


def _phase(name: str, is_short: bool) -> list[str]:
    """A phase's name in at most two lines; short where there are many phases."""
    first, *rest = name.split()
    if not is_short:
        return [first, *rest]
    return [SHORT_NAMES.get(first, first), *(rest[-1:] if "micro-batch" in rest else [])]


def _round_steps(limit: float) -> list[float]:
    """Round numbers from 0 to `limit`, five to ten of them."""
    unit = 10 ** math.floor(math.log10(limit / 4))
    step = unit * max(factor for factor in (1, 2, 5) if unit * factor <= limit / 4)
    return [step * number for number in range(int(limit / step) + 1)]


def _grid(y: float, right: float, name: str) -> str:
    return _line(LEFT, y, right, y, "rung") + _text(LEFT - 6, y + 4, name, "end")


def _points(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


def _text(x: float, y: float, content: str, anchor: str = "start", style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{style}">{escape(content)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<line class="{style}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _figure(words: Words, width: int, height: float, shapes: Sequence[str]) -> str:
    label = f"<title>{escape(words.title)}</title><desc>{escape(words.description)}</desc>"
    return f'<svg role="img" class="w{width}" viewBox="0 0 {width} {height:.0f}">{label}{"".join(shapes)}</svg>'
