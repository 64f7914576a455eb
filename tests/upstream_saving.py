"""Experiments of `upstream_probe.py`: what checkpoints and exports hold, and what a resumed run starts from."""

from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import load_file
from upstream_probe import FULL, V1, V2, llama, lora, make_trainer, prepared, raised, rank

AC = {"fsdp_activation_checkpointing": True}
FSDP = {"fsdp1": V1, "fsdp2": V2}


def _train(folder: Path, model: Any, settings: dict[str, Any], precision: str = "no", **options: Any) -> Any:
    resume = options.pop("resume", None)
    trainer = make_trainer(folder, model, settings, precision, **options)
    trainer.train(resume_from_checkpoint=resume)
    dist.barrier()
    return trainer


def adapter_exports(folder: Path) -> Any:
    seen = {}
    for name, settings in {"fsdp2": V2, "fsdp2 ac": {**V2, **AC}, "fsdp1": V1}.items():
        trainer = _train(folder / name, lora(), {**settings, **FULL})
        trainer.save_model(str(folder / name / "final"))
        dist.barrier()
        file = folder / name / "final" / "adapter_model.safetensors"
        seen[name] = [len(load_file(file)), file.stat().st_size]
    return seen


def sharded_save_model(folder: Path) -> Any:
    seen = {}
    for name, settings in FSDP.items():
        _train(folder / name, llama(), settings, max_steps=1).save_model(str(folder / name / "final"))
        dist.barrier()
        seen[name] = (folder / name / "final").exists()
    return seen


def unwrapped_save_pretrained(folder: Path) -> Any:
    seen = {}
    for name, settings in FSDP.items():
        accelerator, model, _ = prepared(llama(), settings)
        target = folder / name / str(rank())
        seen[name] = raised(accelerator.unwrap_model(model).save_pretrained, target)
        if rank() == 0 and not seen[name]:
            seen[name] = {key: list(tensor.shape) for key, tensor in load_file(target / "model.safetensors").items()}
    return seen


def full_after_sharded(folder: Path) -> Any:
    seen = {}
    for name, settings in FSDP.items():
        trainer = _train(folder / name, llama(), settings, max_steps=1)
        plugin = trainer.accelerator.state.fsdp_plugin
        plugin.set_state_dict_type("FULL_STATE_DICT")
        again = raised(trainer._save_checkpoint, trainer.model, trial=None)
        seen[name] = [type(plugin.state_dict_config).__name__, again]
    return seen
