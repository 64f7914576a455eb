"""Runs `train/sft.py` unchanged and notes the optimizer's state just after it was loaded from a checkpoint.

Gathered by torch and not through accel_fsdp. Output: `moments.pt` from rank 0, in the folder named by PROBE_OUT.
"""

import os
import runpy
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from accel_fsdp.training import trainer

SFT = Path(__file__).parent.parent / "train" / "sft.py"

load = trainer.SftTrainer._load_optimizer_and_scheduler


def load_and_note(self: Any, checkpoint: str | None) -> None:
    load(self, checkpoint)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state_dict = get_optimizer_state_dict(self.model, self.optimizer.optimizer, options=options)
    if os.environ["RANK"] == "0":
        torch.save(state_dict["state"], Path(os.environ["PROBE_OUT"]) / "moments.pt")


trainer.SftTrainer._load_optimizer_and_scheduler = load_and_note
runpy.run_path(str(SFT), run_name="__main__")
