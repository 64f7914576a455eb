"""The ready-made YAMLs of accelerate_configs/: each really trains, and the linter finds nothing in them."""

from pathlib import Path

import pytest
import reference_docs
import torch
from conftest import CHAT_DATA, ROOT
from jobs import Jobs, launch
from offline import assert_exports_offline
from test_engines import SHIPPED

from accel_fsdp import linter
from accel_fsdp.models import catalogue
from accel_fsdp.wizard import MODEL, PRESETS

FOLDER = ROOT / "accelerate_configs"
ONE_MACHINE = ["--num_machines", "1"]
SMALLER = {"fsdp2_two_nodes": ONE_MACHINE}
METHOD = {"lora": ["--use_peft"], "qlora": ["--use_peft", "--load_in_4bit"], "full": []}
SHARDS = {
    "fsdp1": "sharding: FSDP1",
    "fsdp2": "sharding: FSDP2",
    "zero": "DEEPSPEED",
}


ALONE = "zero3_offload"
LARGER = {name for name, given in PRESETS.items() if given.keys() & {"tp", "ep"}}
"""Presets whose meshes need more ranks than two."""
TOGETHER = [name for name in PRESETS if name not in {"tpu", ALONE, *SHIPPED, *LARGER}]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Jobs:
    """One launch of the presets as shipped, bfloat16 too, but on 2 CPU processes instead of 8 or 16 GPUs."""
    folder = tmp_path_factory.mktemp("presets")
    shared = ["--model_name_or_path", tiny_model, "--dataset_name", CHAT_DATA, "--max_steps", "2"]
    shared += ["--max_length", "32", "--logging_steps", "1", "--disable_tqdm", "true"]
    made = []
    for names in (TOGETHER, [ALONE]):
        jobs = {
            name: ["--config_file", FOLDER / f"{name}.yaml", *shared, *METHOD[PRESETS[name]["method"]]]
            for name in names
        }
        made.append(launch(jobs, folder, ["--num_processes", "2", *SMALLER.get(names[0], [])]))
    return Jobs(folder, made[0].printed | made[1].printed)


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("name", [*TOGETHER, ALONE])
def test_it_trains_on_two_ranks_and_exports(name: str, runs: Jobs, tmp_path: Path) -> None:
    """The others are in test_engines.py."""
    output = runs.printed[name]
    assert "exported and verified" in output
    assert next(text for start, text in SHARDS.items() if name.startswith(start)) in output
    assert output.count("  loss ") == 2
    trained_as = torch.bfloat16 if name.startswith("zero") else torch.float32
    assert_exports_offline(runs.folder / name, tmp_path / "offline", trained_as)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_linter_finds_nothing_with_their_model(path: Path) -> None:
    findings = linter.lint(path, linter.LintOptions(model=PRESETS[path.stem].get("model", MODEL)))
    assert [finding for finding in findings if finding.severity != "note"] == []


@pytest.mark.slow
def test_the_catalogue_is_what_the_library_builds() -> None:
    for name, entry in catalogue.entries().items():
        assert reference_docs.catalogue_facts(name, entry["config"]) == entry["facts"], f"{name}: run make docs"


def test_the_catalogue_has_the_published_sizes() -> None:
    published = {"meta-llama/Llama-3.1-8B": 8_030_261_248, "Qwen/Qwen2.5-7B": 7_615_616_512}
    published |= {"mistralai/Mixtral-8x7B-v0.1": 46_702_792_704, "openai-community/gpt2": 124_439_808}
    published |= {"Qwen3-235B-A22B": 235_093_634_560, "mistralai/Mistral-Small-24B-Base-2501": 23_572_403_200}
    published |= {"google/gemma-3-4b-it": 4_300_079_472, "Qwen2.5-VL-3B-Instruct": 3_754_622_976}
    published |= {"Qwen2.5-VL-7B-Instruct": 8_292_166_656, "Qwen2.5-VL-72B-Instruct": 73_410_777_344}
    published |= {"Llama-4-Scout-17B-16E": 108_641_793_536, "Llama-4-Maverick-17B-128E": 401_583_781_376}
    published |= {"deepseek-ai/DeepSeek-V3": 671_026_404_352}  # without the layer that predicts one token more
    for name, parameters in published.items():
        facts = catalogue.find(name.lower())
        assert facts is not None
        assert facts.parameters == parameters
