"""Resumes of models that aren't as plain as a Llama.

Some have parameters which no gradient reaches, and for which the optimizer therefore has no state. Some have other
names and shapes in files than in memory.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import SFT, Finished, accelerate_launch, made_yaml
from jobs import launch, save
from reference import job_words, losses_of
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from accel_fsdp.checkpoints import discover, open_checkpoint

STEPS, SAVED, RANKS = 4, 2, 2
UNREACHED = "model.vision_tower.encoder.layers."
"""Units without a gradient; in a unit where others have one, FSDP1 makes it zeros for the rest."""
UNITS = "Gemma3DecoderLayer,SiglipEncoderLayer"
ENGINES = {
    "sharded2": {"fsdp_version": "2", "state_dict_type": "SHARDED_STATE_DICT"},
    "full1": {"fsdp_version": "1", "state_dict_type": "FULL_STATE_DICT"},
}


SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = {**SMALL, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 512, "pad_token_id": 0}


@pytest.fixture(scope="module")
def with_images(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Gemma 3 that could look at images, with the tokenizer of the tiny model."""
    config = Gemma3Config(
        text_config=TEXT,
        vision_config={**SMALL, "image_size": 16, "patch_size": 4, "vision_use_head": False},
        mm_tokens_per_image=4,
        image_token_index=511,
        boi_token_index=510,
        eoi_token_index=509,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    model = Gemma3ForConditionalGeneration(config)
    return save(model, tmp_path_factory.mktemp("model") / "tiny-gemma", tiny_model)


@pytest.fixture(scope="module")
def with_experts(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files hold each expert by itself, the model all of a layer in one tensor."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**TEXT, **experts, eos_token_id=2))
    return save(model, tmp_path_factory.mktemp("model") / "tiny-experts", tiny_model)


@pytest.fixture(scope="module")
def runs(with_images: Path, text_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Under each engine a run without interruption, and one that goes on from its middle; all in one launch."""
    folder, jobs = tmp_path_factory.mktemp("runs"), {}
    shared = job_words(with_images, text_data, folder, STEPS, 2, save_steps=SAVED)
    for name, flags in ENGINES.items():
        config = folder / f"{name}.yaml"
        fixed = {"model": str(with_images), "num_processes": str(RANKS), "mixed_precision": "no", "layer_class": UNITS}
        config.write_text(made_yaml(**fixed, **flags))
        jobs[name] = ["--config_file", str(config), *shared]
        jobs[f"{name}-resumed"] = [*shared, "--resume_from_checkpoint", str(folder / name / f"checkpoint-{SAVED}")]
    return launch(jobs, folder).folder


def states(checkpoint: Path) -> dict[str, bytes]:
    stored = open_checkpoint.read(discover.find(checkpoint)[0], optimizer=True).optimizer
    return {name: tensor.load().numpy().tobytes() for name, tensor in stored.items()}


@pytest.mark.parametrize("name", ENGINES)
def test_what_had_no_state_has_none_after_a_resume(name: str, runs: Path) -> None:
    """Losses and the optimizer's states are those of the run without interruption."""
    straight, resumed = runs / name, runs / f"{name}-resumed"
    assert losses_of(resumed, STEPS) == losses_of(straight, STEPS)
    before, after = states(straight / f"checkpoint-{STEPS}"), states(resumed / f"checkpoint-{STEPS}")
    assert any(name.startswith("state.model.language_model.") for name in before)
    assert not [name for name in before if name.startswith(f"state.{UNREACHED}")]
    assert after == before


@pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings=True. and a tied layer:UserWarning")
@pytest.mark.filterwarnings("ignore:Setting .save_embedding_layers. to .True.:UserWarning")
def test_an_adapter_on_a_tied_head_trains_under_fsdp2(
    sft: Callable[..., Finished], tiny_model: Path, text_data: Path, tmp_path: Path
) -> None:
    """Accelerate has transformers tie the weights again, by a name that PEFT has moved: a KeyError."""
    config = AutoConfig.from_pretrained(tiny_model, tie_word_embeddings=True)
    torch.manual_seed(0)
    model = save(LlamaForCausalLM(config), tmp_path / "tied", tiny_model)
    lora = ("--use_peft", "--lora_dropout", "0", "--lora_target_modules", "q_proj", "embed_tokens", "lm_head")
    alone = sft(*job_words(model, text_data, tmp_path / "alone", STEPS, 4, STEPS), *lora)
    assert alone.code == 0, alone.output
    yaml = tmp_path / "fsdp2.yaml"
    yaml.write_text(made_yaml(model=str(model), num_processes=str(RANKS), mixed_precision="no", fsdp_version="2"))
    words = [*job_words(model, text_data, tmp_path / "sharded", STEPS, 2, STEPS), *lora]
    sharded = accelerate_launch(yaml, SFT, *words)
    assert sharded.code == 0, sharded.output
    assert losses_of(tmp_path / "sharded", STEPS) == pytest.approx(losses_of(tmp_path / "alone", STEPS), abs=1e-5)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("kind", ["with_images", "with_experts"])
def test_weights_of_other_names_in_files_are_loaded(
    kind: str, sft: Callable[..., Finished], request: pytest.FixtureRequest, text_data: Path, tmp_path: Path
) -> None:
    """Without FSDP, where Trainer writes them as `save_pretrained` does; to go on, and at the end as the best ones."""
    model, straight, resumed = request.getfixturevalue(kind), tmp_path / "straight", tmp_path / "resumed"
    middle = straight / f"checkpoint-{SAVED}"
    best = ("--load_best_model_at_end", "true", "--eval_strategy", "steps", "--eval_steps", str(SAVED))
    best += ("--dataset_test_split", "train", "--greater_is_better", "true")  # that with the largest loss
    first = sft(*job_words(model, text_data, straight, STEPS, 4, save_steps=SAVED), *best)
    assert first.code == 0, first.output
    words = job_words(model, text_data, resumed, STEPS, 4, save_steps=SAVED)
    second = sft(*words, "--resume_from_checkpoint", middle)
    assert second.code == 0, second.output
    assert losses_of(resumed, STEPS) == losses_of(straight, STEPS)
    assert_same(straight / "final", middle)
    assert_same(resumed / "final", straight / f"checkpoint-{STEPS}")


def assert_same(first: Path, other: Path) -> None:
    saved, expected = (load_file(folder / "model.safetensors") for folder in (first, other))
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], expected[name]) for name in saved)
