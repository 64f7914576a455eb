"""The processes that a benchmark starts: what they are given, and what they measured."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
MARK = "MEASURED "


def environment(**more: str) -> dict[str, str]:
    """This process's variables and `more`, with the clone's package before what PYTHONPATH names, and no hub."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **more}


def measured(script: str, case: Mapping[str, Any], device: str, seconds: float) -> dict[str, Any]:
    """What one of the scripts beside this one measured of a case; an `error` in its last lines if it failed."""
    command = [sys.executable, str(HERE / script), json.dumps(case), device]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment())
    except subprocess.TimeoutExpired:
        return {"error": f"still running after {seconds} s"}
    marked = [line for line in ran.stdout.splitlines() if line.startswith(MARK)]
    if not marked:
        return {"error": " | ".join((ran.stderr or ran.stdout).strip().splitlines()[-3:])}
    outcome: dict[str, Any] = json.loads(marked[-1].removeprefix(MARK))
    return outcome
