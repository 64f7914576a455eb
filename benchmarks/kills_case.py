"""Runs `train/sft.py` unchanged until it kills its ranks at a random instant: the life that `kills.py` and a test take.

KILL_AT says when: `step:N` during the N-th step, `at:N` as it begins, `save:N` during the first save at step N or
later, `staging:N`, `write:N` and `upload:N` while a checkpoint of step N or later is copied, written in the background
or uploaded, `within:SECONDS` after training began. Each rank named in KILL_RANKS sends itself SIGKILL, or KILL_SIGNAL,
a little apart from the others, as a failing machine would. KILL_SEED makes the instants; the file named by KILL_NOTE
gets what rank 0 was doing.
"""

import json
import os
import random
import runpy
import signal
import threading
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from accel_fsdp.checkpoints import Store, file_names
from accel_fsdp.training import CheckpointWriter, SftTrainer
from accel_fsdp.training.background_saves import BackgroundSaves
from accel_fsdp.training.stored import Uploads

SFT = Path(__file__).parent.parent / "train" / "sft.py"
RANK = os.environ["RANK"]
KIND, _, NUMBER = os.environ.get("KILL_AT", "never:0").partition(":")
APART_SECONDS = 0.05
FIRST_SAVE_SECONDS = 0.2

dice = random.Random(int(os.environ.get("KILL_SEED", "0")))
doing: dict[str, Any] = {"step": 0, "saving": False}


def die_within(seconds: float) -> None:
    """Kills this process after a share of `seconds` that all ranks draw alike, and a little more."""
    delay = dice.uniform(0, seconds) + random.Random(RANK + str(seconds)).uniform(0, APART_SECONDS)
    if RANK in os.environ.get("KILL_RANKS", "0,1,2,3").split(","):
        timer = threading.Timer(delay, _die)
        timer.daemon = True
        timer.start()


def _die() -> None:
    if RANK == "0" and "KILL_NOTE" in os.environ:
        Path(os.environ["KILL_NOTE"]).write_text(json.dumps(doing))
    os.kill(os.getpid(), signal.Signals[os.environ.get("KILL_SIGNAL", "SIGKILL")])


class Watch(TrainerCallback):  # type: ignore[misc]
    """Notes the steps, and sets the timer where a step is to be the last."""

    began = 0.0
    taken = 0.05

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Where this life starts."""
        doing["step"] = doing["resumed"] = state.global_step
        if KIND == "within":
            die_within(float(NUMBER))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The timer of `step:N`."""
        self.began = time.monotonic()
        if KIND in ("at", "step") and state.global_step == int(NUMBER) - 1:
            die_within(self.taken if KIND == "step" else 0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """What was reached."""
        self.taken = time.monotonic() - self.began
        doing["step"] = state.global_step


def watched(original: Any) -> Any:
    """Notes that a save goes on, and sets the timer where it is to be the last."""

    def save(self: Any, *args: Any) -> None:
        doing["saving"] = True
        began = time.monotonic()
        if KIND == "save" and self.state.global_step >= int(NUMBER):
            die_within(doing.get("save_seconds", FIRST_SAVE_SECONDS))
        original(self, *args)
        doing.update(saving=False, save_seconds=time.monotonic() - began)

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


def timed(kind: str, step_of: Any, original: Any) -> Any:
    """A part of a save in the background, with the timer of its kind."""

    def act(self: Any, *args: Any) -> Any:
        began, reached = time.monotonic(), kind == KIND and step_of(self, *args) >= int(NUMBER)
        if reached:
            doing["saving"] = True
            die_within(doing.get(f"{kind}_seconds", FIRST_SAVE_SECONDS))
        result = original(self, *args)
        doing[f"{kind}_seconds"] = time.monotonic() - began
        return result

    return act


def never_passed(kind: str, original: Any) -> Any:
    """What comes after such a part: a timer that is still running then is late."""

    def act(self: Any, *args: Any) -> Any:
        if kind == KIND and doing["saving"]:
            _die()
        return original(self, *args)

    return act


def step_in_name(_: Any, checkpoint: Path, *args: Any) -> int:
    """The step of the checkpoint that is written or uploaded: training may be further."""
    return file_names.step(checkpoint.name)


def step_of_run(checkpoints: Any, *args: Any) -> int:
    """The step of the checkpoint that is copied."""
    return int(checkpoints.trainer.state.global_step)


if KIND in ("staging", "write", "upload"):
    step_of, owner, method, later, passed = {
        "staging": (step_of_run, CheckpointWriter, "save", BackgroundSaves, "begin"),
        "write": (step_in_name, CheckpointWriter, "_complete_in_background", CheckpointWriter, "_seal"),
        "upload": (step_in_name, Uploads, "_bring", Store, "seal"),
    }[KIND]
    setattr(owner, method, timed(KIND, step_of, getattr(owner, method)))
    setattr(later, passed, never_passed(KIND, getattr(later, passed)))
else:
    SftTrainer._save_checkpoint = watched(SftTrainer._save_checkpoint)  # type: ignore[method-assign]
    CheckpointWriter._seal = never_sealed(CheckpointWriter._seal)  # type: ignore[method-assign]
SftTrainer.__init__ = with_watch(SftTrainer.__init__)  # type: ignore[method-assign]
runpy.run_path(str(SFT), run_name="__main__")
