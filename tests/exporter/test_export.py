"""The check after saving: a short, empty or distorted export is an error, and the target folder is all or nothing."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from test_export_architectures import WHOLE
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from accel_fsdp.errors import UserError
from accel_fsdp.exporter import exported_folder


@pytest.fixture
def model(tiny_model: Path) -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(tiny_model)


def saved(model: LlamaForCausalLM, folder: Path) -> dict[str, torch.Tensor]:
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda tensors: tensors.clear(), "holds 0 tensors, expected 21"),
        (lambda tensors: tensors.pop("lm_head.weight"), "lm_head.weight is missing"),
        (lambda tensors: tensors.update({"new": torch.zeros(1)}), "new is unexpected"),
        (lambda tensors: tensors.update({"lm_head.weight": torch.zeros(0)}), r"F32 \[0\], expected F32 \[509, 36\]"),
        (lambda tensors: tensors.update({"lm_head.weight": torch.zeros(509, 36).bfloat16()}), "is BF16"),
    ],
)
def test_a_damaged_export_is_refused(damage: object, message: str, model: LlamaForCausalLM, tmp_path: Path) -> None:
    tensors = saved(model, tmp_path)
    damage(tensors)  # type: ignore[operator]
    save_file(tensors, tmp_path / "model.safetensors")
    expected = exported_folder.expected_tensors(model, None)
    with pytest.raises(UserError, match=message):
        exported_folder.verify(tmp_path, expected)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    (tmp_path / "model.safetensors").unlink()
    assert exported_folder.verify(tmp_path, expected) == 21


def test_an_adapter_is_expected_without_its_base(model: LlamaForCausalLM, tmp_path: Path) -> None:
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"]))
    expected = exported_folder.expected_tensors(adapted, None)
    adapted.save_pretrained(tmp_path)
    assert exported_folder.verify(tmp_path, expected) == 4  # 2 layers, A and B
    save_file({}, tmp_path / "adapter_model.safetensors")  # what PEFT writes when no name matches
    with pytest.raises(UserError, match="holds 0 tensors, expected 4"):
        exported_folder.verify(tmp_path, expected)


def test_tied_weights_are_expected_once(tmp_path: Path) -> None:
    tied = WHOLE["llama tied"]()
    tied.save_pretrained(tmp_path)
    expected = exported_folder.expected_tensors(tied, None)
    assert "lm_head.weight" not in expected.tensors
    exported_folder.verify(tmp_path, expected)
