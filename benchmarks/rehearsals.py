"""How long a rehearsal takes: `python benchmarks/rehearsals.py --write`, each ready-made YAML once, on two idle cores.

The peer is the launch in it that trains and saves: the same small job under `accelerate launch`.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import results

ROOT = Path(__file__).parent.parent
NAMES = sorted(path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml"))


def rehearsed(name: str) -> dict[str, Any]:
    """The report of one, with its seconds."""
    words = [sys.executable, "-m", "accel_fsdp", "rehearse", f"accelerate_configs/{name}.yaml", "--json"]
    began = time.monotonic()
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=False)
    seconds = time.monotonic() - began
    if "{" not in done.stdout:
        return {"seconds": seconds, "refused": done.stderr.strip().splitlines()[0]}
    return {**json.loads(done.stdout), "seconds": seconds}


def row(name: str, report: dict[str, Any]) -> str:
    """A line of the table."""
    if "refused" in report:
        return f"| {name} | | | refused: {report['refused']} |"
    steps = report["steps"]
    said = "all pass" if report["passed"] else f"**{steps[-1]['name']} failed: {steps[-1]['said']}**"
    launch = next((step["seconds"] for step in steps if step["name"] == "train and save"), 0.0)
    ratio = f"{report['seconds'] / launch:.1f}" if launch else ""
    return f"| {name} | {report['seconds']:.0f} | {ratio} | {len(steps)} steps, {said} |"


def main() -> None:
    """Measures and prints, or writes into RESULTS.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the section of RESULTS.md")
    parser.add_argument("names", nargs="*", default=NAMES, help="which of accelerate_configs/")
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    rows = []
    for name in options.names:
        rows.append(row(name, rehearsed(name)))
        print(rows[-1], flush=True)
    if options.write:
        head = [
            "## Rehearsals",
            "",
            "`python benchmarks/rehearsals.py --write`: `accel-fsdp rehearse` of each ready-made",
        ]
        head += [
            "YAML, once, on two idle cores; in seconds, and beside the one launch in it that trains and saves.",
            "",
        ]
        results.keep("rehearsals", [*head, "| YAML | seconds | launches | |", "|---|---|---|---|", *rows])


if __name__ == "__main__":
    main()
