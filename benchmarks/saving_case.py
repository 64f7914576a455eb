"""One job of `saving.py` on each rank: `train/sft.py` unchanged, whose saves and steps are timed.

SAVING_SIDE: `ours` times what Trainer waits for a checkpoint; `torch` replaces the write by torch's own `async_save` of
the same states. SAVING_OUT is the file for rank 0's numbers.
"""

import json
import os
import runpy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import async_save
from transformers import TrainerCallback

from accel_fsdp.training import CheckpointWriter, SftTrainer

SFT = Path(__file__).parent.parent / "train" / "sft.py"
SIDE, OUT = os.environ["SAVING_SIDE"], Path(os.environ["SAVING_OUT"])
waited: list[float] = []
steps: list[tuple[float, bool]] = []
"""Seconds of each step, and whether a save was being written at its end."""
writing: list[Any] = []


def is_writing(trainer: Any) -> bool:
    if SIDE == "torch":
        return bool(writing) and not writing[-1].done()
    background = trainer.checkpoints.background
    written = background._written if background is not None else None
    return written is not None and not written.done()


class Watch(TrainerCallback):  # type: ignore[misc]
    """Times steps without saves."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.began, self.in_flight = trainer, 0.0, False

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.began, self.in_flight = time.monotonic(), is_writing(self.trainer)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        steps.append((time.monotonic() - self.began, self.in_flight))

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        if os.environ["RANK"] == "0":
            OUT.write_text(json.dumps({"waited": waited, "steps": steps}))


def timed(save: Callable[..., Any]) -> Callable[..., Any]:
    def saving(self: Any, *args: Any) -> None:
        dist.barrier()
        began = time.monotonic()
        save(self, *args)
        waited.append(time.monotonic() - began)

    return saving


def by_torch(self: Any, trial: Any, write: Callable[[], None]) -> None:
    """torch's own `async_save` of weights and optimizer states, without Trainer's small files, hashes or a marker."""
    for save in writing:
        save.result()
    if not hasattr(self, "gloo"):
        self.gloo = dist.new_group(backend="gloo")
    model, optimizer = get_state_dict(self.trainer.model, self.trainer.optimizer)
    state = {"model": model, "optimizer": optimizer}
    writing.append(async_save(state, checkpoint_id=self.folder(trial), process_group=self.gloo))


def with_watch(init: Callable[..., None]) -> Callable[..., None]:
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.add_callback(Watch(self))

    return made


SftTrainer._save_checkpoint = timed(SftTrainer._save_checkpoint)  # type: ignore[method-assign]
SftTrainer.__init__ = with_watch(SftTrainer.__init__)  # type: ignore[method-assign]
if SIDE == "torch":
    CheckpointWriter.save = by_torch  # type: ignore[method-assign]
runpy.run_path(str(SFT), run_name="__main__")
