"""The ready-made YAMLs of accelerate_configs/: each really trains, and the linter finds nothing in them."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import reference_docs
import torch
from conftest import CHAT_DATA, PROBE, ROOT, accelerate_launch
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


def launched(names: Sequence[str], model: Path, folder: Path) -> str:
    """One launch of presets as shipped, bfloat16 too, but on 2 CPU processes instead of 8 or 16 GPUs."""
    shared = ["--model_name_or_path", str(model), "--dataset_name", str(CHAT_DATA), "--max_steps", "2"]
    shared += ["--max_length", "32", "--logging_steps", "1", "--disable_tqdm", "true"]
    words = {name: ["--output_dir", str(folder / name), *METHOD[PRESETS[name]["method"]]] for name in names}
    more = {name: ["--config_file", str(FOLDER / f"{name}.yaml"), *words[name]] for name in names[1:]}
    smaller = ["--num_processes", "2", *SMALLER.get(names[0], [])]
    env = {"PROBE_OUT": str(folder), "PROBE_MORE": json.dumps(more)}
    config = FOLDER / f"{names[0]}.yaml"
    finished = accelerate_launch(config, PROBE, *shared, *words[names[0]], launcher=smaller, **env)
    assert finished.code == 0, finished.output
    return f"job {names[0]}\n{finished.output}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> tuple[Path, str]:
    """The folder of all runs, and what they printed."""
    folder = tmp_path_factory.mktemp("presets")
    return folder, launched(TOGETHER, tiny_model, folder) + launched([ALONE], tiny_model, folder)


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("name", [*TOGETHER, ALONE])
def test_it_trains_on_two_ranks_and_exports(name: str, runs: tuple[Path, str], tmp_path: Path) -> None:
    """The others are in test_engines.py."""
    folder, printed = runs
    output = printed.partition(f"job {name}\n")[2].partition("\njob ")[0]
    assert "exported and verified" in output
    assert next(text for start, text in SHARDS.items() if name.startswith(start)) in output
    assert output.count("  loss ") == 2
    trained_as = torch.bfloat16 if name.startswith("zero") else torch.float32
    assert_exports_offline(folder / name, tmp_path / "offline", trained_as)


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
