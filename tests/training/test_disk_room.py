"""The number of checkpoints that a run has yet to write, against Trainer's own callback."""

from typing import Any

import pytest
from transformers import TrainingArguments
from transformers.trainer_callback import DefaultFlowCallback, TrainerControl, TrainerState

from accel_fsdp.training import disk_room


@pytest.mark.parametrize("strategy", ["steps", "epoch", "no"])
@pytest.mark.parametrize(("steps", "every", "per_epoch"), [(100, 7, 30), (90, 30, 30), (5, 10, 5), (40, 0.3, 25)])
def test_saves_are_trainers(strategy: str, steps: int, every: float, per_epoch: int) -> None:
    options: dict[str, Any] = {"save_strategy": strategy, "save_steps": every, "max_steps": steps}
    arguments = TrainingArguments(output_dir="never-written", use_cpu=True, **options)
    state, callback, saves = TrainerState(max_steps=steps), DefaultFlowCallback(), 0
    state.compute_steps(arguments, steps)
    for step in range(1, steps + 1):
        state.global_step, state.epoch = step, step / per_epoch
        control = callback.on_step_end(arguments, state, TrainerControl())
        if step % per_epoch == 0 or step == steps:
            control = callback.on_epoch_end(arguments, state, control)
        saves += control.should_save
    assert disk_room.saves_in(strategy, every, steps, per_epoch) == saves
