"""Tables, previews and progress. The only module of the package that prints: data to stdout, messages to stderr."""

import difflib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.segment import Segment, Segments
from rich.style import Style
from rich.table import Table
from rich.text import Text

from accel_fsdp.errors import one_line, printable, to_stdout


class Stdout(Console):
    """A console whose errors, such as a full disk, are reported to the user."""

    def print(self, *objects: Any, **how: Any) -> None:
        with to_stdout():
            super().print(*objects, **how)


messages = Console(stderr=True, highlight=False, emoji=False)
data = Stdout(highlight=False, emoji=False)


def say(text: str, style: str = "", wrap: bool = False, lines: bool = False) -> None:
    """Prints a message.

    With `lines` it may have several; otherwise a line feed is part of a name, and is escaped. Long lines stay whole so
    that they can be copied, unless `wrap` breaks them between words.
    """
    _print(messages, printable(text) if lines else one_line(text), style, wrap)


def answered(question: str, answer: str) -> None:
    """Prints the line that stays on the screen after an answer, broken between words."""
    messages.print(Text.assemble(("? ", "dim"), (one_line(question), "bold"), " ", (one_line(answer), "cyan")))


def clear() -> None:
    """Clears the terminal, so that the next screen is whole."""
    messages.clear()


def put(text: str, style: str = "", wrap: bool = False, lines: bool = False) -> None:
    """Prints data for a pipe: `text` and a newline, with the options of `say`; the style shows in terminals only."""
    _print(data, printable(text) if lines else one_line(text), style, wrap)


def _print(console: Console, text: str, style: str, wrap: bool) -> None:
    if wrap:
        console.print(text, style=style, markup=False)
    else:  # rich's own texts turn tabs into spaces
        console.print(Segments([Segment(text, Style.parse(style)), Segment.line()]), soft_wrap=True)


def show_diff(before: str, after: str, old_name: str, new_name: str = "") -> None:
    """Prints the diff of a file in the format and colours of git; nothing without a change."""
    colours = {"+": "green", "-": "red", "@": "cyan"}
    texts = before.splitlines(), after.splitlines()
    for line in difflib.unified_diff(*texts, old_name, new_name or old_name, lineterm=""):
        say(line, style=colours.get(line[:1], ""))


def show_table(
    titles: Sequence[str],
    rows: Sequence[Sequence[str]],
    styles: Sequence[str],
    to_stderr: bool = False,
    whole: bool = False,
) -> None:
    """Prints one row per entry, folded to the width of the terminal; to stderr where stdout carries the data.

    With `whole`, names stay in one piece where there is no terminal.
    """
    table = Table(box=None, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0))
    for title in titles:
        table.add_column(title, overflow="fold")
    for row, style in zip(rows, styles, strict=True):
        table.add_row(*(Text(one_line(cell)) for cell in row), style=style)
    console = messages if to_stderr else data
    if whole and not console.is_terminal:
        lines = [titles, *([one_line(cell) for cell in row] for row in rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            text = "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
            console.print(text.rstrip(), markup=False, soft_wrap=True)
    else:
        console.print(table)


def bar(parts: Sequence[tuple[str, str, float]], whole: float, cells: int) -> Text:
    """A stacked bar of (letter, colour, size), `cells` wide where it fills `whole`; letters where no colours show."""
    text, filled, total = Text(), 0, 0.0
    for letter, colour, size in parts:
        total += size
        count = min(round(total / whole * cells), cells + 1) - filled
        text.append(("█" if data.color_system else letter) * count, style=colour)
        filled += count
    return text if filled <= cells else text[:cells] + Text("▶" if data.color_system else ">", style="red")


def show_bars(titles: Sequence[str], rows: Sequence[Sequence[str | Text]], legend: list[tuple[str, str, str]]) -> None:
    """Prints a table whose numbers are right-aligned, with a legend of the bars below, if any."""
    table = Table(box=None, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0))
    for title, cell in zip(titles, rows[0], strict=True):
        number = isinstance(cell, str) and cell[:1].isdigit()
        table.add_column(title, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(one_line(cell)) if isinstance(cell, str) else cell for cell in row))
    data.print(table)
    if not legend:
        return
    labels = (((("█" if data.color_system else letter) + f" {kind}  "), colour) for letter, colour, kind in legend)
    data.print(Text.assemble(*labels))


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """Shows a spinner and the elapsed time while something slow runs; silent when stderr is not a terminal."""
    if not messages.is_terminal:  # rich would start a thread nevertheless, which a browser's Python can't
        yield
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=messages, transient=True) as bars:
        bars.add_task(escape(one_line(text)), total=None)
        yield


@contextmanager
def progress(text: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Shows a bar with GB/s and the time left; yields a function to call with each number of bytes that was moved."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=messages, transient=True, disable=not messages.is_terminal
    ) as bars:
        task = bars.add_task(escape(one_line(text)), total=total_bytes)
        yield lambda count: bars.update(task, advance=count)
