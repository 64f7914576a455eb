"""Experiments of `upstream_probe.py` without `cpu.enable`: what an FSDP YAML becomes where there is no accelerator."""

from pathlib import Path
from typing import Any

from upstream_probe import V2, llama, make_trainer


def fsdp_on_cpu(folder: Path) -> Any:
    seen = {}
    for use_cpu in (False, True):
        trainer = make_trainer(folder, llama(), V2, use_cpu=use_cpu)
        trainer.train()
        kind = type(trainer.model_wrapped).__name__
        seen[str(use_cpu)] = [trainer.is_fsdp_enabled, trainer.args.world_size, kind, trainer.state.global_step]
    return seen
