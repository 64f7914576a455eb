"""Runs `train/sft.py` unchanged on a disk that something fills when FILL says, after the check for room.

save: before the last checkpoint. Else a part of it, or the export, by the method of Trainer that writes it: of several,
each in a run of its own on a disk that has room again.
"""

import os
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate.state import AcceleratorState, GradientState

from accel_fsdp import training
from accel_fsdp.errors import guard
from accel_fsdp.training import CheckpointWriter, trainer

SFT = Path(__file__).parent.parent / "train" / "sft.py"
METHODS = {
    "save": "_begin",
    "begin": "_begin",
    "weights": "save_model",
    "optimizer": "_save_optimizer_and_scheduler",
    "random": "_save_rng_state",
    "state": "_save_scaler",
}
LEFT_BYTES = {"begin": 0, "save": 300_000, "state": 0, "random": 0}

OUTPUT = Path(sys.argv[sys.argv.index("--output_dir") + 1])
BALLAST = OUTPUT / "ballast"


def filling(name: str, act: Callable[..., Any]) -> Callable[..., Any]:
    """`act` on a disk that was filled before it, or after it where the next thing to be written is meant."""

    def fill(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = getattr(self, "trainer", self)
        ready = run.exporter.is_writing if name == "export" else run.state.global_step == run.state.max_steps
        first = act(self, *args, **kwargs) if name in ("save", "state") else None
        if ready and self.args.should_save and not BALLAST.exists():
            with BALLAST.open("wb", buffering=0) as file:
                free = shutil.disk_usage(OUTPUT).free - LEFT_BYTES.get(name, 4096)
                file.write(bytes(max(free, 0)))
        return first if name in ("save", "state") else act(self, *args, **kwargs)

    return fill


def once(name: str) -> int:
    owner = CheckpointWriter if name in ("save", "begin") else trainer.SftTrainer
    method = METHODS.get(name, "_save")
    before = getattr(owner, method)
    AcceleratorState._reset_state()
    GradientState._reset_state()
    setattr(owner, method, filling(name, before))
    try:
        return guard(runpy.run_path(str(SFT), run_name="sft")["main"])
    finally:
        setattr(owner, method, before)


names = os.environ.get("FILL", "save").split(",")
codes = []
for name in names:
    if len(names) > 1:
        sys.argv[sys.argv.index("--output_dir") + 1] = str(OUTPUT / name)
        print(f"FILLING {name}", file=sys.stderr, flush=True)
    codes.append(once(name))
    if len(names) > 1:
        print(f"LEFT {[path.name for path in (OUTPUT / name).glob('*checkpoint*')]}", file=sys.stderr, flush=True)
        BALLAST.unlink()
        shutil.rmtree(OUTPUT / name)
print(f"CODES {codes}", file=sys.stderr, flush=True)
training.finish(codes[-1])
sys.exit(codes[-1])
