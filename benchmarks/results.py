"""RESULTS.md: each benchmark keeps its own part, between two marks."""

from collections.abc import Iterable
from datetime import date
from pathlib import Path

RESULTS = Path(__file__).parent / "RESULTS.md"


def keep(section: str, lines: Iterable[str]) -> None:
    """Puts `lines` and the date in place of a section, or behind all others if it is new."""
    start, end = f"<!-- {section} -->\n", f"<!-- /{section} -->\n"
    text = RESULTS.read_text() if RESULTS.exists() else "# Results\n"
    if start not in text:
        text = f"{text.rstrip()}\n\n{start}{end}"
    before, _, rest = text.partition(start)
    section = "\n".join([*lines, "", f"Measured on {date.today()}.", ""])
    RESULTS.write_text(before + start + section + end + rest.partition(end)[2])


def kept(section: str) -> list[str]:
    """The lines of a section; none where there is no such."""
    _, _, rest = RESULTS.read_text().partition(f"<!-- {section} -->\n")
    return rest.partition(f"<!-- /{section} -->\n")[0].splitlines()
