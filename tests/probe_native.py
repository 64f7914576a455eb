"""Runs `train/native.py` several times in the same processes: most of a launch is imports.

Arguments: those that the runs share, then for each run `RUN` and its own.
"""

import runpy
import sys
from pathlib import Path

import torch.distributed as dist

from accel_fsdp.errors import guard
from accel_fsdp.ranks import cpu

NATIVE = Path(__file__).parent.parent / "train" / "native.py"


def jobs() -> None:
    main = runpy.run_path(str(NATIVE), run_name="native")["main"]
    program, *words = sys.argv
    shared, *runs = " ".join(words).split("RUN")
    begin = dist.init_process_group
    for run in runs:
        sys.argv = [program, *shared.split(), *run.split()]
        main()
        dist.init_process_group = lambda **options: None
    dist.init_process_group = begin


code = guard(jobs)
cpu.finish(code)
sys.exit(code)
