"""The record of a run in its output folder: `run.json` from its start on, and `loss.svg` at its end."""

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

from accel_fsdp import atomic_files, svg
from accel_fsdp.checkpoints import file_names, summary
from accel_fsdp.launch import agreement
from accel_fsdp.launch_environment import LaunchEnvironment
from accel_fsdp.svg import Curve, Words

CURVE_WIDTH = 720


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
            "versions": {"python": platform.python_version(), **agreement.versions()},
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
        """Records the end of the run: its log, its losses, its counts, and the loss curve where there is one."""
        self.content.update(status=status, results={**results(log_history), **totals}, log=log_history)
        self._write()
        curves = loss_curves(log_history)
        if self._writes and curves:
            words = Words("Loss over steps", "; ".join(f"{name} loss {_ends(values)}" for name, values in curves))
            loss_lines = [Curve(name, f"c{number}", values) for number, (name, values) in enumerate(curves, start=1)]
            picture = svg.standalone(svg.losses(words, loss_lines, CURVE_WIDTH))
            atomic_files.write_text(self.folder / file_names.CURVE, picture)

    def _write(self) -> None:
        if self._writes:
            atomic_files.write_text(
                self.folder / file_names.RUN, json.dumps(self.content, indent=2, default=str) + "\n"
            )


def read(folder: Path) -> dict[str, Any]:
    """The record of a run; empty if there is no readable one."""
    return summary.read_json(folder / file_names.RUN)


def _device() -> dict[str, Any]:
    torch = sys.modules.get("torch")  # a script that trains has imported it
    if torch is None or not torch.cuda.is_available():
        return {"device": "cpu", "cores": os.cpu_count()}
    return {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda}


def loss_curves(log_history: list[dict[str, float]]) -> list[tuple[str, list[tuple[int, float]]]]:
    """The points (step, loss) of training and evaluation, without a curve that was never logged."""
    curves = []
    for key, name in (("loss", "training"), ("eval_loss", "held-out")):
        points = [(int(entry["step"]), float(entry[key])) for entry in log_history if key in entry]
        if points:
            curves.append((name, points))
    return curves


def results(log_history: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """First, best and last of each loss that was logged."""
    summaries = {}
    for name, points in loss_curves(log_history):
        values = [loss for _, loss in points]
        summaries[f"{name} loss"] = {
            "first": values[0],
            "best": min(filter(math.isfinite, values), default=math.nan),
            "last": values[-1],
        }
    return summaries


def _ends(points: list[tuple[int, float]]) -> str:
    return f"from {points[0][1]:.4f} to {points[-1][1]:.4f}"
