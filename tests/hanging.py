"""Runs `train/sft.py` unchanged, with a fault on one rank as HANG_STEP ends: the life that tests of hangs take.

HANG says which: `skip` leaves out a collective that the others take part in, `raise` raises, `stop` sends itself
SIGSTOP. `wait` makes the file HANG_NOTE and waits, so that a test may cut the power, and `save` does so in the save of
that step. HANG_RANK names the rank.
"""

import os
import runpy
import signal
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import TrainerCallback

from accel_fsdp.training import CheckpointWriter, SftTrainer

SFT = Path(__file__).parent.parent / "train" / "sft.py"
RANK, KIND, STEP = os.environ["RANK"], os.environ["HANG"], int(os.environ["HANG_STEP"])


class Fault(TrainerCallback):  # type: ignore[misc]
    """The fault, as a callback of a user may have it."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Once, on one rank."""
        if state.global_step != STEP:
            return
        is_here = os.environ["HANG_RANK"] == RANK
        if KIND == "skip" and not is_here:
            take_part()
        if KIND == "raise" and is_here:
            raise ValueError("a fault of one rank")
        if KIND == "wait" and is_here:
            wait()
        if KIND == "stop" and is_here:
            time.sleep(3)  # for a sign of life from here
            os.kill(os.getpid(), signal.SIGSTOP)


def wait() -> None:
    """Until the power is cut."""
    Path(os.environ["HANG_NOTE"]).touch()
    time.sleep(300)


def waiting_in_a_save(original: Any) -> Any:
    """Once the files are written, and before the marker says so."""

    def hashes(self: Any, *args: Any) -> Any:
        if KIND == "save" and self.trainer.state.global_step == STEP and os.environ["HANG_RANK"] == RANK:
            wait()
        return original(self, *args)

    return hashes


def take_part() -> None:
    """What all ranks should do."""
    dist.barrier()


def with_fault(original: Any) -> Any:
    """A trainer is made with the callback."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.add_callback(Fault())

    return init


SftTrainer.__init__ = with_fault(SftTrainer.__init__)  # type: ignore[method-assign]
CheckpointWriter._hashes = waiting_in_a_save(CheckpointWriter._hashes)  # type: ignore[method-assign]
runpy.run_path(str(SFT), run_name="__main__")
