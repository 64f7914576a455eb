"""Counts and sizes as text: binary units (GiB) for memory and other limits, decimal units (GB) for files."""

import math
from collections.abc import Callable, Iterable, Sequence

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def listed(names: Iterable[str], conjunction: str) -> str:
    """Joins words, such as: slurm, kubernetes and skypilot."""
    *others, last = names
    return f"{', '.join(others)} {conjunction} {last}" if others else last


def counted(count: int, singular: str, plural: str = "") -> str:
    """A number of things as `1 tensor`, `2 tensors`."""
    return f"{count:,} {singular if count == 1 else plural or singular + 's'}"


def first_few(words: Sequence[str], most: int, separator: str = ", ") -> str:
    """Joins the first words, and counts the others: `a, b and 7 more`."""
    rest = len(words) - most
    return separator.join(words[:most]) + (f" and {rest} more" if rest > 0 else "")


def millions(count: int, digits: int = 2) -> str:
    """A number of parameters as `1,235.81 M`; one digit is enough before training."""
    return f"{count / 1e6:,.{digits}f} M"


def parameters(count: int, language: int = 0) -> str:
    """A model's size as `10,642.9 M parameters (language part 9,775.2 M)`; `language` 0: the whole model."""
    part = f" (language part {millions(language, 1)})" if language else ""
    return f"{millions(count, 1)} parameters{part}"


def gib_or_mib(count: float, gib_from: float = GIB) -> str:
    """Bytes as `63.7 GiB`, and as `512.0 MiB` below `gib_from`."""
    return f"{count / GIB:,.1f} GiB" if count >= gib_from else f"{count / MIB:,.1f} MiB"


def any_time(seconds: float) -> str:
    """A time as `1.24 s` or `12.4 ms`."""
    return f"{seconds:,.2f} s" if abs(seconds) >= 1 else f"{seconds * 1e3:,.1f} ms"


def distinguishable(write: Callable[[float], str], *counts: float) -> list[str]:
    """Different sizes as texts that differ: formatted by `write`, or in bytes if `write` gives equal texts."""
    words = [write(count) for count in counts]
    return words if len(set(words)) == len(set(counts)) else [f"{count:,.0f} bytes" for count in counts]


def gib_of(used: float, has: float) -> str:
    """The used part of a total, as `63.7 of 79.2 GiB`."""
    part, total = distinguishable(lambda count: f"{count / GIB:,.1f} GiB", used, has)
    return f"{part.partition(' ')[0]} of {total}"


def gb_or_mb(count: float) -> str:
    """Bytes of files as `1.24 GB` or `3.50 MB`."""
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"


def kib_or_mib(count: int) -> str:
    """A whole number of KiB or MiB, as `4 KiB` or `16 MiB`."""
    return f"{count // MIB} MiB" if count >= MIB else f"{count // KIB} KiB"


def per_second(count: float) -> str:
    """Bytes per second of a disk or a network, as `1.24 GB/s` or `3.5 MB/s`."""
    return f"{count / 1e9:,.2f} GB/s" if count >= 1e8 else f"{count / 1e6:,.1f} MB/s"


def about_gib(count: float) -> str:
    """Bytes for a sentence, rounded as in `64 GiB` or `2.3 GiB`."""
    return f"{_about(count / GIB)} GiB"


def about_gb(count: float) -> str:
    """Bytes for a sentence, rounded as in `64 GB`, `2.3 GB` or `45 MB`."""
    return f"{_about(count / 1e9)} GB" if count >= 1e9 else f"{_about(count / 1e6)} MB"


def two_digits(amount: float) -> str:
    """A number rounded to two digits: `8.7`, `13`, `1,300`, `0.012`."""
    if not amount:
        return "0"
    digits = 1 - math.floor(math.log10(abs(amount)))
    rounded = round(amount, digits)
    return f"{rounded:,.{max(1 - math.floor(math.log10(abs(rounded))), 0)}f}"


def _about(amount: float) -> str:
    return f"{amount:,.0f}" if amount >= 10 else f"{amount:,.1f}"


def gib_in_figure(gib: float) -> str:
    """GiB as a figure shows them."""
    return f"{number_in_figure(gib)} GiB"


def number_in_figure(gib: float) -> str:
    """GiB where a heading names the unit, as in a table; a small size gets one more digit."""
    return f"{gib:,.1f}" if gib >= 1 or gib < 0.005 else f"{gib:.2f}"
