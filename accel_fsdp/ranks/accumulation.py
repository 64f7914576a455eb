"""Reads from Accelerate and Trainer how many micro-batches a step has."""

import sys
from typing import Any


def batches() -> int:
    """The micro-batches of a step, by which Accelerate, or a Trainer whose step is running, divides losses."""
    trainer = running_trainer()
    if trainer is not None and trainer.args.gradient_accumulation_steps > 1:
        return int(trainer.args.gradient_accumulation_steps)
    return int(state.num_steps) if (state := _state()) else 1


def is_last() -> bool:
    """Whether Accelerate counts the newest micro-batch as the last of a step; always true if it counts none."""
    return bool(state.sync_gradients) if (state := _state()) else True


def is_midway() -> bool:
    """Whether a dataloader that Accelerate prepared has more batches; its last step may have fewer than the others."""
    state = _state()
    return state is not None and state.in_dataloader and not state.end_of_dataloader


def _state() -> Any:
    state = sys.modules.get("accelerate.state")
    return state.GradientState() if state and state.is_initialized() else None


def running_trainer() -> Any:
    """The Trainer whose training loop is running; None if there is none."""
    trainer = sys.modules.get("transformers.trainer")
    frame = sys._getframe(1) if trainer else None
    while frame:
        own = frame.f_locals.get("self") if frame.f_code.co_name == "_inner_training_loop" else None
        if isinstance(own, trainer.Trainer):  # type: ignore[union-attr]
            return own
        frame = frame.f_back
    return None
