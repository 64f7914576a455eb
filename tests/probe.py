"""Runs `train/sft.py` unchanged and, just before it exports, notes what each rank holds and what the model computes.

Reads torch objects directly and not through accel_fsdp.sharding, so that the two can be compared. Output: one JSON file
per rank and `logits.pt` from rank 0, in the folder named by PROBE_OUT.
"""

import json
import os
import runpy
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from accel_fsdp import training

SFT = Path(__file__).parent.parent / "train" / "sft.py"
OUT = Path(os.environ["PROBE_OUT"])
INPUT_IDS = torch.arange(3, 43).reshape(2, 20)

export = training.SftTrainer.export


def export_and_note(self: training.SftTrainer, target: Path, card: str) -> int:
    rank = os.environ["RANK"]
    parameters = list(self.model.parameters())
    held = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in parameters)
    kinds = sorted({type(p).__name__ for p in parameters})
    (OUT / f"rank{rank}.json").write_text(json.dumps({"held": held, "kinds": kinds}))
    self.model.eval()
    with torch.no_grad():
        logits = self.model(input_ids=INPUT_IDS).logits.float()
    if rank == "0":
        torch.save(logits, OUT / "logits.pt")
    return export(self, target, card)


training.SftTrainer.export = export_and_note
runpy.run_path(str(SFT), run_name="__main__")
