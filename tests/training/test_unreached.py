"""Runs that go on with parameters which no gradient reaches, and which the optimizer therefore knows nothing of."""

import json
import math
from pathlib import Path

import pytest
import torch
from conftest import PROBE, accelerate_launch, made_yaml
from reference import job_words, losses_of
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from accel_fsdp.checkpoints import FileReader, discover, open_checkpoint, part_of

STEPS, SAVED, RANKS = 4, 2, 2
UNREACHED = "model.vision_tower.encoder.layers."
"""Units without a gradient; in a unit where others have one, FSDP1 makes it zeros for the rest."""
UNITS = "Gemma3DecoderLayer,SiglipEncoderLayer"
ENGINES = {
    "sharded2": {"fsdp_version": "2", "state_dict_type": "SHARDED_STATE_DICT"},
    "full2": {"fsdp_version": "2", "state_dict_type": "FULL_STATE_DICT"},
    "sharded1": {"fsdp_version": "1", "state_dict_type": "SHARDED_STATE_DICT"},
    "full1": {"fsdp_version": "1", "state_dict_type": "FULL_STATE_DICT"},
}


@pytest.fixture(scope="module")
def with_images(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Gemma 3 that could look at images, with the tokenizer of the tiny model."""
    folder = tmp_path_factory.mktemp("model") / "tiny-gemma"
    folder.mkdir()
    for path in (*tiny_model.glob("*token*"), tiny_model / "chat_template.jinja"):
        (folder / path.name).write_bytes(path.read_bytes())
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**small, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 512, "pad_token_id": 0}
    config = Gemma3Config(
        text_config=text,
        vision_config={**small, "image_size": 16, "patch_size": 4, "vision_use_head": False},
        mm_tokens_per_image=4,
        image_token_index=511,
        boi_token_index=510,
        eoi_token_index=509,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    Gemma3ForConditionalGeneration(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def runs(with_images: Path, text_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Under each engine a run without interruption, and one that goes on from its middle; all in one launch."""
    folder, jobs = tmp_path_factory.mktemp("runs"), {}
    for name, flags in ENGINES.items():
        config = folder / f"{name}.yaml"
        fixed = {"model": str(with_images), "num_processes": str(RANKS), "mixed_precision": "no", "layer_class": UNITS}
        config.write_text(made_yaml(**fixed, **flags))
        middle = str(folder / name / f"checkpoint-{SAVED}")
        jobs[name] = ["--config_file", str(config)]
        jobs[f"{name}-resumed"] = ["--config_file", str(config), "--resume_from_checkpoint", middle]
    first = next(iter(jobs))
    words = job_words(with_images, text_data, folder / first, STEPS, 2, save_steps=SAVED)
    more = json.dumps({name: each for name, each in jobs.items() if name != first})
    finished = accelerate_launch(folder / f"{first}.yaml", PROBE, *words, PROBE_OUT=str(folder), PROBE_MORE=more)
    assert finished.code == 0, finished.output
    return folder


def states(checkpoint: Path) -> dict[str, bytearray]:
    reader = FileReader()
    try:
        stored = open_checkpoint.read(discover.find(checkpoint)[0], reader, optimizer=True).optimizer
        return {name: part_of(reader, one, 0, math.prod(one.shape)) for name, one in stored.items()}
    finally:
        reader.close()


@pytest.mark.parametrize("name", ENGINES)
def test_what_had_no_state_has_none_after_a_resume(name: str, runs: Path) -> None:
    """Losses and the optimizer's states are those of the run without interruption."""
    straight, resumed = runs / name, runs / f"{name}-resumed"
    assert losses_of(resumed, STEPS) == losses_of(straight, STEPS)
    before, after = states(straight / f"checkpoint-{STEPS}"), states(resumed / f"checkpoint-{STEPS}")
    assert any(name.startswith("state.model.language_model.") for name in before)
    assert not [name for name in before if name.startswith(f"state.{UNREACHED}")]
    assert after == before
