"""Models for images and text, trained on text: the class that their config names is loaded, whole."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, Qwen3_5Config

from accel_fsdp import models
from accel_fsdp.models.shrink import shrink
from accel_fsdp.training import load_model
from accel_fsdp.training.arguments import ModelArguments
from accel_fsdp.training.trainer import SftTrainer


def test_the_class_that_the_config_names_is_loaded_with_all_its_weights(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """AutoModelForCausalLM would drop the layers for images, and the export would have none."""
    Qwen3_5Config(architectures=["Qwen3_5ForConditionalGeneration"]).save_pretrained(tmp_path / "real")
    folder = shrink(str(tmp_path / "real"), tmp_path / "small").folder
    model = load_model.load_model(ModelArguments(model_name_or_path=str(folder)), AutoTokenizer.from_pretrained(folder))
    assert type(model).__name__ == "Qwen3_5ForConditionalGeneration"
    assert "language part 0.5 M of 1.8 M" in " ".join("".join(capfd.readouterr()).split())
    trainer = SftTrainer.__new__(SftTrainer)
    trainer.beside_text = models.beside_text(model)
    decayed = trainer.get_decay_parameter_names(model)
    assert "model.language_model.embed_tokens.weight" in decayed
    assert not [name for name in decayed if "visual" in name]  # FSDP1 gives them gradients of zeros, which decay them
    model.save_pretrained(tmp_path / "out")
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], weight.float()) for name, weight in before.items())
