"""The GPU calls of a script: those that the CPU stood in for in a rehearsal, and those that failed."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from accel_fsdp.ranks import RankEvent

RAISED = re.compile(
    r"Torch not compiled with \w+ enabled|No CUDA GPUs are available|Found no NVIDIA driver|invalid device ordinal"
    r"|Cannot access accelerator device when none is available|compiled without CUDA|requires CUDA support|CUDA error:"
    r"|CUDA driver initialization failed|invalid argument to reset_|NVTX functions not installed|'_cuda_\w+'"
    r"|not linked with support for cuda|dummy base class|Cannot get CUDA generator|object on a CUDA device|NCCL|nccl"
)
"""torch's errors without a GPU, in builds with and without CUDA."""
ASKED = "the script asks for a GPU, and a rehearsal has none"
INSTEAD = 'skip it where the weights are on a CPU: if next(model.parameters()).device.type == "cuda":'
MORE_RANKS = "--processes N: a rehearsal has as many GPUs for the script as ranks, and by default two ranks"
SPEAKS_OF_ONE = re.compile(r"gpu|cuda|torch\.accelerator", re.IGNORECASE)
LINES_BEFORE = 3


def taken(events: Sequence[RankEvent]) -> str:
    """The GPU calls for which the CPU stood in, each with its first line in the script; empty without any."""
    lines: dict[str, str] = {}
    for event in events:
        if event.kind == "taken-for-cpu":
            lines.setdefault(event.content["what"], event.content["line"])
    places = [f"{what} ({os.path.basename(line)})" if line else what for what, line in lines.items()]
    return f"taken for the CPU: {', '.join(places)}" if places else ""


def instead(error: str) -> str:
    """The fix for a script that raised `error`; empty if it has another cause than a missing GPU."""
    return INSTEAD if RAISED.search(error) else ""


def why_ended(line: str) -> str:
    """The fix for a script that exited at `line` because it found too few GPUs; empty for other reasons."""
    file, _, number = line.rpartition(":")
    if not Path(file).is_file():
        return ""
    lines = Path(file).read_text(encoding="utf-8", errors="replace").splitlines()
    lines_above = "\n".join(lines[max(0, int(number) - 1 - LINES_BEFORE) : int(number)])
    return MORE_RANKS if SPEAKS_OF_ONE.search(lines_above) else ""
