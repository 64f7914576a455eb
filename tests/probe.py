"""Runs `train/sft.py` unchanged and, just before it exports, notes what each rank holds and what the model computes.

Reads torch objects directly and not through accel_fsdp.sharding, so that the two can be compared. Output: one JSON file
per rank and `logits.pt` from rank 0, in the folder named by PROBE_OUT. With PROBE_LORA the same processes then train an
adapter, into a folder `lora` beside that of the first run: most of a launch is imports.
"""

import json
import os
import runpy
import sys
from pathlib import Path

import torch
from accelerate.state import AcceleratorState, GradientState
from torch.distributed.tensor import DTensor

from accel_fsdp import training
from accel_fsdp.errors import guard

SFT = Path(__file__).parent.parent / "train" / "sft.py"
OUT = Path(os.environ["PROBE_OUT"])
INPUT_IDS = torch.arange(3, 43).reshape(2, 20)

export = training.SftTrainer.export


def export_and_note(self: training.SftTrainer, target: Path) -> int:
    rank = os.environ["RANK"]
    parameters = list(self.model.parameters())
    held = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in parameters)
    kinds = sorted({type(p).__name__ for p in parameters})
    losses = [entry["loss"] for entry in self.state.log_history if "loss" in entry]
    run = target.parent.name
    (OUT / f"{run}-rank{rank}.json").write_text(json.dumps({"held": held, "kinds": kinds, "losses": losses}))
    engine = self.model_wrapped
    engine.eval()
    with torch.no_grad():
        logits = engine(input_ids=INPUT_IDS).logits.float()
    if rank == "0":
        torch.save(logits, OUT / f"{run}-logits.pt")
    return export(self, target)


def jobs() -> None:
    main = runpy.run_path(str(SFT), run_name="sft")["main"]
    main()
    if "PROBE_LORA" in os.environ:
        AcceleratorState._reset_state()
        GradientState._reset_state()
        output = Path(sys.argv[sys.argv.index("--output_dir") + 1])
        sys.argv += ["--output_dir", str(output.with_name("lora")), "--learning_rate", "1e-2"]
        sys.argv += ["--use_peft", "--lora_dropout", "0.0"]
        main()


training.SftTrainer.export = export_and_note
code = guard(jobs)
training.finish(code)
sys.exit(code)
