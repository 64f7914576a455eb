"""How long the tests take, from the files that `make test` was told to write:

    PYTEST_ADDOPTS=--junitxml=FILE make test
    python benchmarks/suite.py FILE... [--write "today"]

Keeps the seconds of each test file in `tests/durations.json`, by which the slow ones are started first. `--write` keeps
the times of these runs as one row of RESULTS.md; the rows of other names stay.
"""

import argparse
import json
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import results

ROOT = Path(__file__).parent.parent
KEPT = ROOT / "tests" / "durations.json"
HEAD = [
    "## Tests",
    "",
    "`make test` on two cores, with nothing else running: each run's time, and the sum over its tests, two at a time.",
    "",
    "| tree | tests | runs | all tests, one by one |",
    "|---|---|---|---|",
]


def by_file(report: Path) -> dict[str, float]:
    """The seconds of each file with its fixtures, longest first."""
    seconds_by_file: Counter[str] = Counter()
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        seconds_by_file[case.attrib["classname"].replace(".", "/") + ".py"] += float(case.attrib["time"])
    return {name: round(seconds, 1) for name, seconds in seconds_by_file.most_common()}


def row(name: str, reports: list[Path]) -> str:
    """One line of the table."""
    suites = [suite for report in reports for suite in ElementTree.parse(report).getroot().iter("testsuite")]
    minutes = ", ".join("{}:{:02}".format(*divmod(round(float(suite.attrib["time"])), 60)) for suite in suites)
    seconds = sum(by_file(reports[-1]).values())
    return f"| {name} | {int(suites[-1].attrib['tests']):,} | {minutes} | {seconds:,.0f} s |"


def main() -> None:
    """Keeps and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--write", metavar="NAME")
    given = parser.parse_args()
    KEPT.write_text(json.dumps(by_file(given.reports[-1]), indent=1) + "\n")
    line = row(given.write or "these", given.reports)
    print(line)
    if given.write:
        others = [line for line in results.kept("tests")[len(HEAD) :] if not line.startswith(f"| {given.write} |")]
        results.keep("tests", [*HEAD, *others, line])


if __name__ == "__main__":
    main()
