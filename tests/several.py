"""Runs `train/sft.py` once for each list of arguments in SEVERAL, in one process: most of a launch is imports.

A line `job NAME` stands before what each prints, and a line `code N` after it.
"""

import json
import os
import runpy
import sys
from pathlib import Path

from accelerate.state import AcceleratorState, GradientState

from accel_fsdp.errors import guard

SFT = Path(__file__).parent.parent / "train" / "sft.py"

main = runpy.run_path(str(SFT), run_name="sft")["main"]
for name, words in json.loads(os.environ["SEVERAL"]).items():
    AcceleratorState._reset_state()
    GradientState._reset_state()
    print(f"job {name}", flush=True)
    sys.argv = [str(SFT), *words]
    try:
        code = guard(main)
    except SystemExit as ended:
        code = int(ended.code or 0)
    print(f"\ncode {code}", file=sys.stderr, flush=True)
