"""Makes the tables that the page shows while Python loads: `python web/tables.py FOLDER MODEL ...`, for build.py.

A file for each model has the first sections of the planner's answer for each of the common machines.
"""

import gzip
import json
import sys
from pathlib import Path

from accel_fsdp.planner import browser

MACHINES = (
    *("1xRTX 4090-24GB", "2xRTX 4090-24GB", "8xL40S-48GB", "8xA100-40GB", "8xA100-80GB", "4xH100-80GB"),
    *("8xH100-80GB", "8xH200-141GB"),
)


def main(folder: Path, models: list[str]) -> None:
    for model in models:
        sections = {machine: browser.summary(model, machine) for machine in MACHINES}
        name = model.replace("/", "--")
        text = json.dumps(sections, separators=(",", ":"))
        (folder / f"{name}.plans").write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
