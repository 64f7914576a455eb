"""How long the tests take: `python benchmarks/suite.py FILE`, the file that `make test` was told to write.

    PYTEST_ADDOPTS=--junitxml=FILE make test

Keeps the seconds of each file in `tests/durations.json`, by which the slow ones are started first; prints the total.
"""

import json
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
KEPT = ROOT / "tests" / "durations.json"


def by_file(report: Path) -> dict[str, float]:
    """The seconds of each file with its fixtures, longest first."""
    found: Counter[str] = Counter()
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        found[case.attrib["classname"].replace(".", "/") + ".py"] += float(case.attrib["time"])
    return {name: round(seconds, 1) for name, seconds in found.most_common()}


def main() -> None:
    """Keeps and prints."""
    seconds = by_file(Path(sys.argv[1]))
    KEPT.write_text(json.dumps(seconds, indent=1) + "\n")
    print(f"{sum(seconds.values()):,.0f} s of tests in {len(seconds)} files")


if __name__ == "__main__":
    main()
