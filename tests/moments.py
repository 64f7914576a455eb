"""Runs `train/sft.py` unchanged and notes the optimizer's state and the weights, just after they were loaded.

Gathered by torch or DeepSpeed, and not through accel_fsdp. Output from rank 0, in the folder named by PROBE_OUT:
`moments.pt` and `weights.pt`; of each save `moments-N.pt` and `weights-N.pt`, where PROBE_SAVES is in the environment.
"""

import os
import runpy
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

from accel_fsdp.training import trainer

SFT = Path(__file__).parent.parent / "train" / "sft.py"
KEYS = ("exp_avg", "exp_avg_sq")

load, save = trainer.SftTrainer._load_optimizer_and_scheduler, trainer.SftTrainer._save_checkpoint


def note(self: Any, ending: str = "") -> None:
    moments, weights = of_deepspeed(self.deepspeed) if self.is_deepspeed_enabled else of_torch(self)
    if os.environ["RANK"] == "0":
        folder = Path(os.environ["PROBE_OUT"])
        torch.save(moments, folder / f"moments{ending}.pt")
        torch.save(weights, folder / f"weights{ending}.pt")


def of_torch(self: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    moments = get_optimizer_state_dict(
        self.model, getattr(self.optimizer, "optimizer", self.optimizer), options=options
    )
    return moments.get("state", {}), get_model_state_dict(self.model, options=options)


def of_deepspeed(engine: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if engine.zero_optimization_stage() < 3:  # which looks for the moments after the first step of the first group
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    parameters = dict(engine.module.named_parameters())
    moments = {
        name: {key: safe_get_full_optimizer_state(parameter, key).clone() for key in KEYS}
        for name, parameter in parameters.items()
    }
    return moments, {name: safe_get_full_fp32_param(parameter).clone() for name, parameter in parameters.items()}


def load_and_note(self: Any, checkpoint: str | None) -> None:
    load(self, checkpoint)
    if checkpoint is not None:
        note(self)


def note_and_save(self: Any, *args: Any, **more: Any) -> None:
    if "PROBE_SAVES" in os.environ:
        note(self, f"-{self.state.global_step}")
    save(self, *args, **more)


trainer.SftTrainer._load_optimizer_and_scheduler = load_and_note
trainer.SftTrainer._save_checkpoint = note_and_save
runpy.run_path(str(SFT), run_name="__main__")
