"""Runs `train/sft.py` unchanged where something is said to run out, as SCARCE names it.

gpu: the second rank's device is full at its second step. host: next to nothing is free when the model is gathered.
patience: another machine's folder is waited for one second.
number: the second rank's loss is infinite at its second step, its gradients aren't.
time: as number, and each checkpoint takes three seconds to complete.
"""

import os
import runpy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer

from accel_fsdp.hardware import host
from accel_fsdp.training import CheckpointWriter, disk_room, trainer

SFT = Path(__file__).parent.parent / "train" / "sft.py"
trained = trainer.SftTrainer.training_step
stepped = Trainer.training_step


def out_of_memory(self: trainer.SftTrainer, *args: Any) -> torch.Tensor:
    loss = trained(self, *args)
    if self.state.global_step == 1 and os.environ["RANK"] == "1":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has 79 GiB in use.")
    return loss


def infinite(self: Trainer, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    loss = stepped(self, model, inputs, num_items_in_batch)
    return loss * (float("inf") if self.state.global_step == 1 and os.environ["RANK"] == "1" else 1)


def slowly(complete: Callable[..., None]) -> Callable[..., None]:
    def completing(*args: Any) -> None:
        time.sleep(3)
        complete(*args)

    return completing


if os.environ["SCARCE"] == "gpu":
    trainer.SftTrainer.training_step = out_of_memory
elif os.environ["SCARCE"] in ("number", "time"):
    Trainer.training_step = infinite
    if os.environ["SCARCE"] == "time":
        CheckpointWriter._complete = slowly(CheckpointWriter._complete)
elif os.environ["SCARCE"] == "patience":
    disk_room.SHOWN_SECONDS = 1
else:
    host.free_memory = lambda: 1000
runpy.run_path(str(SFT), run_name="__main__")
