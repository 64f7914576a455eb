"""Files that other trainers write: with settings beside the weights, under a prefix, quantised."""

import argparse
import collections
import datetime
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from runs import export, refused, set_in
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM


def settings() -> dict[str, Any]:
    counts = collections.defaultdict(int, {"rows": 3})
    namespace = argparse.Namespace(lr=1e-3, betas=(0.9, 0.99), name=None)
    return {
        **{"best_loss": np.float64(2.5), "epoch": np.int64(3), "rate": np.float32(0.1), "counts": counts},
        **{"args": namespace, "more": types.SimpleNamespace(a=1), "when": datetime.datetime(2026, 1, 1)},
        **{"lists": collections.defaultdict(list), "took": datetime.timedelta(hours=1)},
    }


def test_settings_beside_the_weights_carry_none(tiny_model: Path, tmp_path: Path) -> None:
    state = AutoModelForCausalLM.from_pretrained(tiny_model).state_dict()
    torch.save({"model": state, **settings()}, tmp_path / "run.pth")
    tensors = export(tmp_path / "run.pth", tmp_path / "out", model=str(tiny_model))
    assert all(torch.equal(tensors[name], state[name]) for name in tensors)


class Unknown:
    """Some class of a project."""


def test_other_objects_are_refused_with_the_way_out(tiny_model: Path, tmp_path: Path) -> None:
    state = AutoModelForCausalLM.from_pretrained(tiny_model).state_dict()
    torch.save({"model": state, "config": Unknown()}, tmp_path / "run.pth")
    error = refused(r"names \S+Unknown, which no checkpoint needs", tmp_path / "run.pth", model=str(tiny_model))
    assert "torch.save(model.state_dict(), FILE)" in error.fix


def test_two_models_in_one_file_are_not_guessed_at(tiny_model: Path, tmp_path: Path) -> None:
    state = AutoModelForCausalLM.from_pretrained(tiny_model).state_dict()
    both = {f"{name}.{key}": tensor for name in ("student", "teacher") for key, tensor in state.items()}
    torch.save(both, tmp_path / "both.pt")
    refused("isn't of the model", tmp_path / "both.pt", model=str(tiny_model))


@pytest.mark.parametrize("settings", [{"quant_method": "fp8"}, {"quant_method": "bitsandbytes", "load_in_4bit": True}])
def test_a_quantised_base_is_named(settings: dict[str, Any], tiny_model: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    adapted.save_pretrained(tmp_path / "adapter")
    AutoModelForCausalLM.from_pretrained(tiny_model).save_pretrained(tmp_path / "base")
    tensors = load_file(tmp_path / "base" / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name], tensors[f"{name}_scale"] = tensors[name].to(torch.uint8), torch.ones(1)
    save_file(tensors, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    set_in(tmp_path / "base" / "config.json", quantization_config=settings)
    quantised = rf"base is quantised \({settings['quant_method']}\)"
    refused(quantised, tmp_path / "adapter", model=str(tmp_path / "base"), merge_adapter=True)
    refused(r"is quantised|from_pretrained|can't build", tmp_path / "base")
