"""Runs a script of `proofs.py` under DeepSpeed, `proofs_zero.py RECORDS SCRIPT ...`, and records its first updates.

A rehearsal records none there. The gradients are those that DeepSpeed itself gathers, before its optimizer's step.
"""

import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

from accel_fsdp.launch.ranks import records

MOST_UPDATES = 2


class Recorder:
    """Writes a file for each update and rank, in which rank 0 has the whole weights and gradients."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.written = folder, 0
        self.weights: dict[str, Any] = {}
        self.forwards: list[Any] = []
        self.forward, self.step = DeepSpeedEngine.forward, DeepSpeedEngine._take_model_step

    def install(self) -> None:
        recorder = self

        def forward(engine: Any, *args: Any, **kwargs: Any) -> Any:
            if engine.training and recorder.written < MOST_UPDATES:
                recorder.weights = recorder.weights or _parts(engine, safe_get_full_fp32_param)
                recorder.forwards.append({"inputs": records.recorded([list(args), dict(kwargs)])})
            return recorder.forward(engine, *args, **kwargs)

        def step(engine: Any, *args: Any, **kwargs: Any) -> Any:
            if recorder.written < MOST_UPDATES:
                recorder.write(engine)
            return recorder.step(engine, *args, **kwargs)

        DeepSpeedEngine.forward, DeepSpeedEngine._take_model_step = forward, step

    def write(self, engine: Any) -> None:
        precision = "bf16" if engine.bfloat16_enabled() else "no"
        update = {
            "weights": self.weights,
            "reduced": _parts(engine, safe_get_full_grad, only_trained=True),
            "trained": [name for name, weight in engine.module.named_parameters() if weight.requires_grad],
            "forwards": self.forwards,
            "precision": precision,
            "cast": precision,
        }
        if engine.global_rank:
            update |= {"weights": {}, "reduced": {}}
        torch.save(update, self.folder / f"{engine.global_rank}.{self.written}")
        self.written, self.weights, self.forwards = self.written + 1, {}, []


def _parts(engine: Any, gathered: Any, only_trained: bool = False) -> dict[str, Any]:
    """Every rank has to take part. Frozen weights are left out where ZeRO-3 has parted them: they stay as loaded."""
    parts = {}
    for name, weight in engine.module.named_parameters():
        if weight.requires_grad or not only_trained:
            value = gathered(weight)
            if value is None and not only_trained and not hasattr(weight, "ds_id"):
                value = weight
            if value is not None:
                parts[name] = ([0] * value.dim(), value.detach().float().clone())
    return parts


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    del sys.argv[:2]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    Recorder(folder).install()
    runpy.run_path(sys.argv[0], run_name="__main__")
