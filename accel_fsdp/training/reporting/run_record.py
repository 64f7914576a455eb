"""The record of a run in its output folder: `run.json`."""

import json
import math
import os
import platform
import sys
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from accel_fsdp import atomic_files, errors, untrusted_files
from accel_fsdp.checkpoints import file_names
from accel_fsdp.launch_environment import LaunchEnvironment


class RunRecord:
    """`run.json`: versions, arguments, config, timings, results and log of a run.

    Only the first rank writes it. A resumed run keeps the records of earlier sessions under `earlier`.
    """

    def __init__(self, folder: Path, arguments: Mapping[str, Any], first_rank: bool) -> None:
        self.folder, self._writes, self._since = folder, first_rank, time.perf_counter()
        launch = LaunchEnvironment.now()
        self.content: dict[str, Any] = {
            "status": "running",
            "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "versions": errors.versions(),
            "machine": {"host": platform.node(), "ranks": launch.world_size, **_device()},
            "config": launch.settings,
            "arguments": dict(arguments),
            "timings_seconds": {},
        }

    def begin(self, plan: Mapping[str, Any]) -> None:
        """Writes the file for the first time, once the run has locked its folder. `plan` is the plan of the run."""
        self.content["plan"] = dict(plan)
        if self._writes and (before := read(self.folder)):
            self.content["earlier"] = [*before.pop("earlier", []), before]
        self._write()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.content["timings_seconds"][phase], self._since = round(now - self._since, 3), now

    def finish(self, log_history: list[dict[str, float]], totals: Mapping[str, Any], status: str = "finished") -> None:
        """Records the end of the run: its log, its losses and its counts."""
        self.content.update(status=status, results={**results(log_history), **totals}, log=log_history)
        self._write()

    def _write(self) -> None:
        if self._writes:
            atomic_files.write_text(
                self.folder / file_names.RUN, json.dumps(self.content, indent=2, default=str) + "\n"
            )


def read(folder: Path) -> dict[str, Any]:
    """The record of a run; empty if there is no readable one."""
    return untrusted_files.read_json(folder / file_names.RUN)


def _device() -> dict[str, Any]:
    torch = sys.modules.get("torch")  # a script that trains has imported it
    if torch is None or not torch.cuda.is_available():
        return {"device": "cpu", "cores": os.cpu_count()}
    return {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda}


def results(log_history: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """First, best and last of each loss that was logged."""
    summaries = {}
    for key, name in (("loss", "training loss"), ("eval_loss", "held-out loss")):
        if values := [float(entry[key]) for entry in log_history if key in entry]:
            best = min(filter(math.isfinite, values), default=math.nan)
            summaries[name] = {"first": values[0], "best": best, "last": values[-1]}
    return summaries
