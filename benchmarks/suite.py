"""The seconds of each test file, by which the slow ones are started first, from a file that `make test` wrote:

PYTEST_ADDOPTS=--junitxml=FILE make test
python benchmarks/suite.py FILE
"""

import argparse
import json
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
KEPT = ROOT / "tests" / "durations.json"


def by_file(report: Path) -> dict[str, float]:
    """The seconds of each file with its fixtures, longest first."""
    seconds_by_file: Counter[str] = Counter()
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        seconds_by_file[case.attrib["classname"].replace(".", "/") + ".py"] += float(case.attrib["time"])
    return {name: round(seconds, 1) for name, seconds in seconds_by_file.most_common()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, metavar="FILE")
    seconds = by_file(parser.parse_args().report)
    KEPT.write_text(json.dumps(seconds, indent=1) + "\n")
    print(f"{sum(seconds.values()):,.0f} s, all tests one by one")


if __name__ == "__main__":
    main()
