"""Ends a rank whose step, save or evaluation doesn't end, with the stacks of its threads."""

import faulthandler
from typing import Any

from transformers import TrainerCallback

from accel_fsdp.launch_environment import LaunchEnvironment
from accel_fsdp.ranks import stacks


class HangTimeout(TrainerCallback):  # type: ignore[misc]
    """For any Trainer: `trainer.add_callback(accel_fsdp.HangTimeout(600))`.

    The timer runs in C, so that it also ends a process whose main thread holds the interpreter's lock. Each step,
    micro-batch, save and evaluation starts it again. `seconds`: by default those of `accel-fsdp launch --hang-timeout`;
    0: never.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self.seconds = LaunchEnvironment.now().hang_timeout if seconds is None else seconds

    def start(self, *args: Any, **kwargs: Any) -> None:
        """Starts the timer, again if it runs."""
        if self.seconds:
            faulthandler.dump_traceback_later(self.seconds, exit=True, file=stacks.file())

    on_train_begin = on_substep_end = on_step_end = on_save = on_evaluate = on_prediction_step = start

    def stop(self, *args: Any, **kwargs: Any) -> None:
        """Stops the timer."""
        if self.seconds:
            faulthandler.cancel_dump_traceback_later()

    on_train_end = stop
