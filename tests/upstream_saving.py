"""Experiments of `upstream_probe.py`: what checkpoints and exports hold, and what a resumed run starts from."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from upstream_probe import FULL, V1, V2, AtStart, llama, local, lora, make_trainer, prepared, raised, rank

AC = {"fsdp_activation_checkpointing": True}
EVERY_STEP = {"save_strategy": "steps", "save_steps": 1}
FSDP = {"fsdp1": V1, "fsdp2": V2}


def _train(folder: Path, model: Any, settings: dict[str, Any], precision: str = "no", **options: Any) -> Any:
    resume = options.pop("resume", None)
    trainer = make_trainer(folder, model, settings, precision, **options)
    trainer.train(resume_from_checkpoint=resume)
    dist.barrier()
    return trainer


def _stored(checkpoint: Path) -> list[str]:
    """The names in a sharded model checkpoint."""
    metadata = FileSystemReader(checkpoint / "pytorch_model_fsdp_0").read_metadata()
    return [name for name in metadata.state_dict_metadata if name.startswith("model.")]


def _copy(source: Path, target: Path, *without: str) -> Path:
    """A copy of a checkpoint that lacks some files, made by rank 0."""
    if rank() == 0:
        shutil.copytree(source, target, ignore=shutil.ignore_patterns(*without))
    dist.barrier()
    return target


def _adapter_b(model: Any, _: Any) -> float:
    return sum(local(p).abs().sum().item() for name, p in model.named_parameters() if "lora_B" in name)


def _adam(model: Any, optimizer: Any) -> float:
    """The size of Adam's first moments, over all ranks."""
    total = torch.tensor(0.0)
    for state in optimizer.state.values():
        if "exp_avg" in state:
            total += local(state["exp_avg"]).double().square().sum()
    dist.all_reduce(total)
    return total.sqrt().item()


def _rate(model: Any, optimizer: Any) -> float:
    return optimizer.param_groups[0]["lr"]


def adapter_exports(folder: Path) -> Any:
    seen = {}
    for name, settings in {"fsdp2": V2, "fsdp2 ac": {**V2, **AC}, "fsdp1": V1}.items():
        trainer = _train(folder / name, lora(), {**settings, **FULL})
        trainer.save_model(str(folder / name / "final"))
        dist.barrier()
        file = folder / name / "final" / "adapter_model.safetensors"
        seen[name] = [len(load_file(file)), file.stat().st_size]
    return seen


def adapter_resumes(folder: Path) -> Any:
    seen = {}
    for name, settings in {"fsdp2": V2, "fsdp2 ac": {**V2, **AC}, "fsdp1": V1}.items():
        first = _train(folder / name, lora(), settings, max_steps=1, **EVERY_STEP)
        checkpoint, look = folder / name / "checkpoint-1", AtStart(_adapter_b)
        trained = _adapter_b(first.model, None)
        _train(folder / name, lora(), settings, callbacks=[look], resume=str(checkpoint))
        seen[name] = {"stored": len(_stored(checkpoint)), "trained": trained, "resumed": look.seen}
    return seen


def gathered_adapter_resumes(folder: Path) -> Any:
    """From a gathered checkpoint; where PEFT wrote nothing into it, from one with the whole adapter."""
    seen = {}
    for name, settings in FSDP.items():
        first = _train(folder / name, lora(), {**settings, **FULL}, max_steps=1, **EVERY_STEP)
        path, look = folder / name / "checkpoint-1" / "pytorch_model_fsdp.bin", AtStart(_adapter_b)
        stored = len(torch.load(path, weights_only=True))
        state = get_model_state_dict(first.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        whole = {key.replace(".default", ""): tensor for key, tensor in state.items() if "lora_" in key}
        trained = sum(tensor.abs().sum().item() for key, tensor in whole.items() if "lora_B" in key)  # on rank 0 alone
        if rank() == 0 and not stored:
            torch.save(whole, path)
        dist.barrier()
        _train(folder / name, lora(), {**settings, **FULL}, callbacks=[look], resume=str(path.parent))
        seen[name] = {"stored": stored, "trained": trained, "resumed": look.seen}
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


def resume_with_another_type(folder: Path) -> Any:
    seen = {}
    full, sharded = {**V1, **FULL}, V1
    for name, wrote, reads in (("sharded", sharded, full), ("full", full, sharded)):
        _train(folder / name, llama(), wrote, max_steps=1, **EVERY_STEP)
        resume = str(folder / name / "checkpoint-1")
        seen[name] = raised(_train, folder / name, llama(), reads, resume=resume)
    weights = _copy(folder / "full" / "checkpoint-1", folder / "weights", "*.bin")
    seen["weights only"] = raised(_train, folder / "new", llama(), full, resume=str(weights))
    return seen


def resume_incomplete(folder: Path) -> Any:
    _train(folder, llama(), V2, **EVERY_STEP)
    seen, whole = {}, folder / "checkpoint-1"
    for missing in ("nothing", "scheduler.pt", "optimizer_0"):
        checkpoint = _copy(whole, folder / f"without {missing}", missing)
        rate, adam = AtStart(_rate), AtStart(_adam)
        _train(folder / "new", llama(), V2, callbacks=[rate, adam], resume=str(checkpoint))
        seen[missing] = {"rate": rate.seen, "adam": adam.seen}
    _copy(whole, folder / "checkpoint-9", "trainer_state.json")
    seen["newest"] = raised(_train, folder, llama(), V2, resume=True)
    return seen


def resume_exact(folder: Path) -> Any:
    seen = {}
    for name, settings in {**FSDP, "fsdp1 flattened": {**V1, "fsdp_use_orig_params": False}}.items():
        first, look = _train(folder / name, llama(), settings, max_steps=1, **EVERY_STEP), AtStart(_adam)
        saved = _adam(None, first.optimizer)
        metadata = FileSystemReader(folder / name / "checkpoint-1" / "optimizer_0").read_metadata()
        stored = sum(key.endswith(".exp_avg") for key in metadata.state_dict_metadata)
        _train(folder / name, llama(), settings, callbacks=[look], resume=str(folder / name / "checkpoint-1"))
        seen[name] = {"stored": stored, "saved": saved, "resumed": look.seen}
    return seen


def bytes_per_parameter(folder: Path) -> Any:
    seen = {}
    for name, settings in {"full": {**V2, **FULL}, "sharded": V2}.items():
        model = llama(vocab_size=8192, hidden_size=64)
        elements = sum(p.numel() for p in model.parameters())
        _train(folder / name, model, settings, max_steps=1, **EVERY_STEP)
        files = [path for path in (folder / name / "checkpoint-1").rglob("*") if path.is_file()]
        seen[name] = sum(path.stat().st_size for path in files) / elements
    return seen


def exported_files(folder: Path) -> Any:
    model = llama(torch.bfloat16, tie_word_embeddings=True)
    model.config.dtype = torch.bfloat16
    used_cache = model.config.use_cache
    _train(folder, model, {**V2, **FULL}, "bf16", max_steps=1).save_model(str(folder / "final"))
    dist.barrier()
    config = json.loads((folder / "final" / "config.json").read_text())
    tensors = load_file(folder / "final" / "model.safetensors")
    twice = "lm_head.weight" in tensors and torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
    return {
        "dtypes": sorted({str(tensor.dtype) for tensor in tensors.values()}),
        "config dtype": config["dtype"],
        "use_cache": [used_cache, config["use_cache"]],
        "embedding twice": twice,
        "says tied": config["tie_word_embeddings"],
    }


def for_later(folder: Path) -> Any:
    """Checkpoints that the tests merge, and that `upstream_alone` resumes on another number of ranks."""
    first = _train(folder / "full", llama(torch.bfloat16), V2, "bf16", max_steps=1, **EVERY_STEP)
    _train(folder / "lora", lora(), V2, max_steps=1, **EVERY_STEP)
    weights = torch.tensor(sum(local(p).double().sum() for p in first.model.parameters()).item())
    dist.all_reduce(weights)
    return {"adam": _adam(None, first.optimizer), "weights": weights.item()}
