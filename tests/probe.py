"""Runs `train/sft.py` unchanged and, just before it exports, notes what each rank holds and what the model computes.

Reads torch objects directly and not through accel_fsdp.training, so that the two can be compared. Output, in the folder
named by PROBE_OUT: RUN-rankN.json and RUN-logits.pt, where RUN is the name of the output folder. PROBE_MORE, a list of
further command lines, makes the same processes run the script again: most of a launch is imports. With `--config_file`
among them, under another YAML. Each ends with its output folder. A line `job RUN` stands before what each of them
prints, and `code N` after it: a job that is refused on all ranks lets the next one begin.
"""

import json
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate.state import AcceleratorState, GradientState
from torch.distributed.tensor import DTensor

from accel_fsdp import training
from accel_fsdp.errors import UserError, guard
from accel_fsdp.launch import launcher
from accel_fsdp.training import trainer

SFT = Path(__file__).parent.parent / "train" / "sft.py"
OUT = Path(os.environ["PROBE_OUT"])
INPUT_IDS = torch.arange(3, 43).reshape(2, 20)

export = trainer.SftTrainer.export


def export_and_note(self: trainer.SftTrainer, target: Path, *rest: str) -> int:
    run, rank = target.parent.name, os.environ["RANK"]
    parameters = list(self.model.parameters())
    held = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in parameters)
    kinds = sorted({type(p).__name__ for p in parameters})
    keys = {"losses": "loss", "norms": "grad_norm", "held_out": "eval_loss"}
    logged = {name: [row[key] for row in self.state.log_history if key in row] for name, key in keys.items()}
    accuracies = [row.get(f"{of}mean_token_accuracy") for row in self.state.log_history for of in ("", "eval_")]
    logged["accuracies"] = [accuracy for accuracy in accuracies if accuracy is not None]
    stage = getattr(self.model_wrapped, "zero_optimization_stage", int)()
    noted = {"held": held, "kinds": kinds, "stage": stage, **logged}
    (OUT / f"{run}-rank{rank}.json").write_text(json.dumps(noted))
    self.model_wrapped.eval()
    with torch.no_grad():
        logits = self.model_wrapped(input_ids=INPUT_IDS).logits.float()
    if rank == "0":
        torch.save(logits, OUT / f"{run}-logits.pt")
    return export(self, target, *rest)


def jobs() -> None:
    main = runpy.run_path(str(SFT), run_name="sft")["main"]
    for number, words in enumerate([sys.argv[1:], *json.loads(os.environ.get("PROBE_MORE", "[]"))]):
        sys.argv = [sys.argv[0], *(anew(words) if number else words)]
        say(f"job {Path(words[-1]).name}")
        say(f"code {ended(main)}")


def say(line: str) -> None:
    if os.environ["RANK"] == "0":
        print(f"\n{line}", file=sys.stderr, flush=True)


def ended(main: Callable[[], None]) -> int:
    """The exit code; not by `guard`, which makes the other ranks wait until the launcher ends them."""
    try:
        main()
    except UserError as error:
        say(str(error))
        return error.exit_code
    return 0


def anew(words: list[str]) -> list[str]:
    """Forgets the job before; returns the arguments of the script."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    if "--accelerate_config" in words:
        del os.environ["ACCELERATE_MIXED_PRECISION"]  # the first run's: else the launcher has been here
    if "--config_file" not in words:
        return words
    at = words.index("--config_file")
    under(Path(words[at + 1]))
    return words[:at] + words[at + 2 :]


def under(config: Path) -> None:
    """This process as Accelerate's launcher would have started it with another YAML of FSDP."""
    for name in [
        name
        for name in os.environ
        if name.startswith(("FSDP_", "ACCELERATE_", "PARALLELISM_CONFIG_", "ACCEL_FSDP_MESH"))
    ]:
        if name != "ACCELERATE_TORCH_DEVICE":
            del os.environ[name]
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.update(launcher.environment(launcher.launcher_args(config, SFT, ())))


trainer.SftTrainer.export = export_and_note
code = guard(jobs)
training.finish(code)
sys.exit(code)
