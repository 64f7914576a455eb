"""The ready-made YAMLs of accelerate_configs/: each really trains, and the linter finds nothing in them."""

from pathlib import Path

import pytest
import torch
from conftest import CHAT_DATA, ROOT, SFT, accelerate_launch
from offline import assert_exports_offline
from test_engines import SHIPPED

from accel_fsdp import arguments, catalogue, lint, reference
from accel_fsdp.presets import MODEL, PRESETS

FOLDER = ROOT / "accelerate_configs"
ONE_MACHINE = ["--num_machines", "1"]
SMALLER = {"fsdp2_two_nodes": ONE_MACHINE}
METHOD = {"lora": ["--use_peft"], "qlora": ["--use_peft", "--load_in_4bit"], "full": []}
SHARDS = {
    "fsdp1": "sharding: FSDP1",
    "fsdp2": "sharding: FSDP2",
    "zero": "DEEPSPEED",
}


@pytest.mark.parametrize("name", [name for name in PRESETS if name not in {"tpu", *SHIPPED}])
def test_it_trains_on_two_ranks_and_exports(name: str, tiny_model: Path, tmp_path: Path) -> None:
    """As shipped, bfloat16 too, but on 2 CPU processes instead of 8 or 16 GPUs; the others are in test_engines.py."""
    method = METHOD[PRESETS[name]["method"]]
    words = ["--model_name_or_path", tiny_model, "--dataset_name", CHAT_DATA, "--output_dir", tmp_path / "run"]
    short = ["--max_steps", "2", "--max_length", "32", "--logging_steps", "1", "--disable_tqdm", "true"]
    smaller = ["--num_processes", "2", *SMALLER.get(name, [])]
    finished = accelerate_launch(FOLDER / f"{name}.yaml", SFT, *words, *short, *method, launcher=smaller)
    assert finished.code == 0, finished.output
    assert "exported and verified" in finished.output
    assert next(text for start, text in SHARDS.items() if name.startswith(start)) in finished.output
    assert finished.output.count("  loss ") == 2
    trained_as = torch.bfloat16 if name.startswith("zero") else torch.float32
    assert_exports_offline(tmp_path / "run", tmp_path / "offline", trained_as)


def test_the_tpu_keys_reach_trainer(tmp_path: Path) -> None:
    """As far as it goes without a TPU: the settings that Trainer's XLA path reads."""
    made = arguments.SftArguments(
        output_dir=str(tmp_path), accelerate_config=str(FOLDER / "tpu.yaml"), use_cpu=True, report_to="none"
    )
    assert made.fsdp_config["xla"] is True
    assert made.fsdp_config["xla_fsdp_v2"] is True
    assert made.fsdp_config["transformer_layer_cls_to_wrap"] == ["LlamaDecoderLayer"]
    assert arguments.xla_settings(FOLDER / "fsdp2.yaml") == {}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_linter_finds_nothing_with_their_model(path: Path) -> None:
    findings = lint.lint(path, lint.Options(model=MODEL))
    assert [one for one in findings if one.severity != "note"] == []


def test_the_catalogue_is_what_the_library_builds() -> None:
    for name, entry in catalogue.entries().items():
        assert reference.catalogue_facts(name, entry["config"]) == entry["facts"], f"{name}: run make docs"


def test_the_catalogue_has_the_published_sizes() -> None:
    published = {"meta-llama/Llama-3.1-8B": 8_030_261_248, "Qwen/Qwen2.5-7B": 7_615_616_512}
    published |= {"mistralai/Mixtral-8x7B-v0.1": 46_702_792_704, "openai-community/gpt2": 124_439_808}
    published |= {"Qwen3-235B-A22B": 235_093_634_560, "mistralai/Mistral-Small-24B-Base-2501": 23_572_403_200}
    published |= {"google/gemma-3-4b-it": 4_300_079_472}
    for name, parameters in published.items():
        facts = catalogue.find(name.lower())
        assert facts is not None
        assert facts.parameters == parameters
