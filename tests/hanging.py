"""Runs `train/sft.py` unchanged, with a fault on one rank as HANG_STEP ends: the life that tests of hangs take.

HANG says which: `kill` kills the rank, and `wait` sleeps, so that a test may cut the power; each makes the file
HANG_NOTE before. HANG_RANK names the rank.
"""

import os
import runpy
import signal
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from accel_fsdp.training import SftTrainer

SFT = Path(__file__).parent.parent / "train" / "sft.py"
RANK, KIND, STEP = os.environ["RANK"], os.environ["HANG"], int(os.environ["HANG_STEP"])


class Fault(TrainerCallback):  # type: ignore[misc]
    """The fault, as a callback of a user may have it."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Once, on one rank."""
        if state.global_step != STEP:
            return
        is_here = os.environ["HANG_RANK"] == RANK
        if KIND == "wait" and is_here:
            wait()
        if KIND == "kill" and is_here:
            Path(os.environ["HANG_NOTE"]).touch()
            os.kill(os.getpid(), signal.SIGKILL)


def wait() -> None:
    """Until the power is cut."""
    Path(os.environ["HANG_NOTE"]).touch()
    time.sleep(300)


def with_fault(original: Any) -> Any:
    """A trainer is made with the callback."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.add_callback(Fault())

    return init


SftTrainer.__init__ = with_fault(SftTrainer.__init__)  # type: ignore[method-assign]
runpy.run_path(str(SFT), run_name="__main__")
