"""The scripts of docs/upstream.md."""

from pathlib import Path

from conftest import ROOT


def script_of(title: str, folder: Path) -> Path:
    """The script of the report with this in its title, written to a folder."""
    reports = (ROOT / "docs" / "upstream.md").read_text().split("\n## ")
    report = next(report for report in reports if title in report.split("\n")[0])
    path = folder / "shows.py"
    path.write_text(report.partition("```python\n")[2].partition("```")[0])
    return path
