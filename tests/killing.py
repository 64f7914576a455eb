"""Runs `train/sft.py` unchanged until it kills its ranks at a random instant: the life that a test takes.

KILL_AT says when: `step:N` during the N-th step, `at:N` as it begins, `save:N` during the first save at step N or
later. Each rank named in KILL_RANKS sends itself SIGKILL, or KILL_SIGNAL, a little apart from the others, as a failing
machine would. KILL_SEED makes the instants.
"""

import os
import random
import runpy
import signal
import threading
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from accel_fsdp.training import CheckpointWriter, SftTrainer

SFT = Path(__file__).parent.parent / "train" / "sft.py"
RANK = os.environ["RANK"]
KIND, _, NUMBER = os.environ.get("KILL_AT", "never:0").partition(":")
APART_SECONDS = 0.05
FIRST_SAVE_SECONDS = 0.2

dice = random.Random(int(os.environ.get("KILL_SEED", "0")))
last_save = {"seconds": FIRST_SAVE_SECONDS}


def die_within(seconds: float) -> None:
    """Kills this process after a share of `seconds` that all ranks draw alike, and a little more."""
    delay = dice.uniform(0, seconds) + random.Random(RANK + str(seconds)).uniform(0, APART_SECONDS)
    if RANK in os.environ.get("KILL_RANKS", "0,1,2,3").split(","):
        timer = threading.Timer(delay, _die)
        timer.daemon = True
        timer.start()


def _die() -> None:
    os.kill(os.getpid(), signal.Signals[os.environ.get("KILL_SIGNAL", "SIGKILL")])


class Watch(TrainerCallback):  # type: ignore[misc]
    """Sets the timer where a step is to be the last."""

    began = 0.0
    taken = 0.05

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The timer of `step:N`."""
        self.began = time.monotonic()
        if KIND in ("at", "step") and state.global_step == int(NUMBER) - 1:
            die_within(self.taken if KIND == "step" else 0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.taken = time.monotonic() - self.began


def watched(original: Any) -> Any:
    """Sets the timer in a save that is to be the last."""

    def save(self: Any, *args: Any) -> None:
        began = time.monotonic()
        if KIND == "save" and self.state.global_step >= int(NUMBER):
            self.checkpoints.wait()  # on a busy machine the one before may still be written in the background
            die_within(last_save["seconds"])
        original(self, *args)
        last_save["seconds"] = time.monotonic() - began

    return save


def never_sealed(original: Any) -> Any:
    """The marker ends the save, so a timer that is still running then is late."""

    def seal(self: Any, *args: Any) -> None:
        if KIND == "save" and self.trainer.state.global_step >= int(NUMBER):
            _die()
        original(self, *args)

    return seal


def with_watch(original: Any) -> Any:
    """A trainer is made with the callback."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.add_callback(Watch())

    return init


SftTrainer._save_checkpoint = watched(SftTrainer._save_checkpoint)  # type: ignore[method-assign]
CheckpointWriter._seal = never_sealed(CheckpointWriter._seal)  # type: ignore[method-assign]
SftTrainer.__init__ = with_watch(SftTrainer.__init__)  # type: ignore[method-assign]
runpy.run_path(str(SFT), run_name="__main__")
