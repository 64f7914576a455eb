"""The light installation: what `pip install .` brings is enough for the commands that need no torch, and the others say
in one line what brings the rest.

The environment is a real one, with the packages that the metadata of `dependencies` lead to and no other.
"""

import json
import os
import venv
import warnings
from collections.abc import Iterator
from importlib.metadata import distribution, requires
from pathlib import Path
from typing import Any

import pytest
import tomllib
from conftest import ROOT, Finished, accel_fsdp, run
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from accel_fsdp.errors import LIBRARIES

MODEL = "Qwen/Qwen3-0.6B"
YAML = ROOT / "accelerate_configs" / "fsdp2.yaml"
SFT = ROOT / "train" / "sft.py"
TRAIN = "pip install 'accel-fsdp[train]'"


def closure(words: list[str]) -> Iterator[str]:
    """The names of the distributions that pip would install for these requirements, without extras of their own."""
    seen: set[str] = set()
    todo = [Requirement(word) for word in words]
    while todo:
        wanted = todo.pop()
        name = canonicalize_name(wanted.name)
        if name in seen or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
            continue
        seen.add(name)
        yield name
        todo += [Requirement(word) for word in requires(name) or ()]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has the light set alone, linked from the one that runs the tests."""
    folder = tmp_path_factory.mktemp("light")
    venv.create(folder, with_pip=False, symlinks=True)
    site = next(folder.glob("lib/python*/site-packages"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name in closure(project["dependencies"]):
        installed = distribution(name)
        tops = {Path(part).parts[0] for part in installed.files or ()} - {"..", "__pycache__"}
        for top in tops:
            os.symlink(Path(str(installed.locate_file(top))).resolve(), site / top)
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def light(python: Path) -> Any:
    def start(*words: str | Path, **environment: str) -> Finished:
        return run([python, "-m", "accel_fsdp", *words], **environment)

    return start


@pytest.fixture(scope="module")
def windows(python: Path) -> Any:
    """The same without what Python lacks on Windows."""

    def start(*words: str | Path) -> Finished:
        return run([python, ROOT / "tests" / "windows.py", *words], PYTHONIOENCODING="cp1252")

    return start


def test_the_light_set_has_none_of_the_heavy_libraries(python: Path) -> None:
    asked = f"from importlib.util import find_spec; print([name for name in {list(LIBRARIES)} if find_spec(name)])"
    assert run([python, "-c", asked]).output.strip() == "[]"


def test_config_check_migrate_plan_and_init_do_what_they_do_with_everything_installed(
    light: Any, tmp_path: Path
) -> None:
    """Byte for byte: the YAMLs, the findings, the plan."""
    for run_it, name in ((light, "light"), (accel_fsdp, "whole")):
        folder = tmp_path / name
        folder.mkdir()
        yaml = folder / "fsdp.yaml"
        finished = run_it("config", "--yes", "--model", MODEL, "--gpus", "8xH100-80GB", "-o", yaml)
        assert (finished.code, yaml.is_file()) == (0, True), finished.output
        assert run_it("check", "--strict", "--model", MODEL, yaml).code == 0
        assert run_it("migrate", yaml, "--to", "zero3", "-o", folder / "zero3.yaml").code == 0
        drawn = folder / "plan.html"
        planned = run_it("plan", "--model", MODEL, "--gpus", "8xH100-80GB", "--json", "--html", drawn)
        assert planned.code == 0
        (folder / "plan.json").write_text(planned.output.replace(str(folder), "FOLDER"))
        assert run_it("init", folder / "project", "--native").code == 0
        (folder / "rules").write_text(run_it("check", "--list-rules").output)
    for path in (tmp_path / "whole").rglob("*"):
        if path.is_file():
            assert path.read_bytes() == (tmp_path / "light" / path.relative_to(tmp_path / "whole")).read_bytes(), path


def test_check_reads_arguments_and_a_script(light: Any, tmp_path: Path) -> None:
    (tmp_path / "args").write_text("--optim adamw_8bit")
    finished = light("check", YAML, "--args", tmp_path / "args", "--script", SFT)
    assert finished.code == 1
    assert "AF604" in finished.output


def test_a_plan_says_what_it_cannot_count(light: Any, tmp_path: Path) -> None:
    (tmp_path / "args.json").write_text(json.dumps({"packing": True, "use_peft": True, "lora_dropout": 0.1}))
    words = ("--config", ROOT / "accelerate_configs" / "fsdp2_lora.yaml", "--args", tmp_path / "args.json")
    finished = light("plan", "--model", "llama-3.1-8b", "--gpus", "8xH100-80GB", *words, "--details")
    assert finished.code == 0, finished.output
    said = " ".join(finished.output.split())
    assert "Without torch and transformers and peft installed, the mask of packed rows is not counted." in said


def test_a_dry_launch_shows_the_command_and_says_what_shows_the_rest(light: Any) -> None:
    finished = light("launch", "--dry-run", YAML, SFT, "--max_steps", "3")
    header, *lines = finished.output.strip().splitlines()
    assert (finished.code, header.startswith("arguments: those given, and the others from ")) == (0, True)
    assert lines[0] in accel_fsdp("launch", "--dry-run", YAML, SFT, "--max_steps", "3").output.splitlines()
    assert "Accelerate's parser was skipped" in lines[1]
    assert TRAIN in " ".join(lines[1:])


def test_the_doctor_looks_at_this_machine_and_says_what_ranks_need(light: Any, windows: Any) -> None:
    there = windows("doctor")
    assert (there.code, TRAIN in there.output, "unlimited open files" in there.output) == (1, True, True), there.output
    finished = light("doctor")
    assert finished.code == 1, finished.output
    assert TRAIN in finished.output


@pytest.mark.parametrize("engine", ["slurm", "kubernetes", "torchrun"])
def test_a_job_file_is_that_of_the_whole_installation(engine: str, light: Any) -> None:
    finished = light("script", engine, YAML, SFT, "--max_steps", "3")
    assert finished == accel_fsdp("script", engine, YAML, SFT, "--max_steps", "3")
    assert finished.code == 0


def test_the_gpus_of_the_machine_are_those_that_the_driver_lists(light: Any, tmp_path: Path) -> None:
    fake = tmp_path / "bin" / "nvidia-smi"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\nfor i in 1 2 3 4; do echo 'NVIDIA H100 80GB HBM3, 81559'; done\n")
    fake.chmod(0o755)
    path = {"PATH": f"{fake.parent}:{os.environ['PATH']}"}
    finished = light("config", "--yes", "--model", MODEL, "-o", tmp_path / "all.yaml", **path)
    assert finished.code == 0, finished.output
    assert "num_processes: 4" in (tmp_path / "all.yaml").read_text()
    light("config", "--yes", "--model", MODEL, "-o", tmp_path / "two.yaml", **path, CUDA_VISIBLE_DEVICES="0,2")
    assert "num_processes: 2" in (tmp_path / "two.yaml").read_text()


@pytest.fixture(scope="module")
def sharded(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose checkpoint is a sharded state dict of `tiny_model` with Adam's moments, in float32."""
    import torch.distributed.checkpoint as dcp
    from transformers import AutoConfig, AutoModelForCausalLM

    run_folder = tmp_path_factory.mktemp("run")
    inner = run_folder / "checkpoint-1" / "pytorch_model_fsdp_0"
    state = AutoModelForCausalLM.from_pretrained(tiny_model).state_dict()
    with warnings.catch_warnings(action="ignore"):  # of one process
        dcp.save({"model": state}, storage_writer=dcp.FileSystemWriter(inner), no_dist=True)
    (inner.parent / "trainer_state.json").write_text('{"global_step": 1}')
    config = AutoConfig.from_pretrained(tiny_model)
    config.dtype = "bfloat16"
    config.save_pretrained(run_folder / "model")
    return run_folder


def test_a_list_of_checkpoints_needs_nothing_that_windows_lacks(windows: Any, sharded: Path) -> None:
    assert "checkpoint-1" in windows("checkpoints", sharded).output


def test_the_functions_are_there_too(python: Path, tmp_path: Path) -> None:
    program = f"""
import accel_fsdp
assert accel_fsdp.check({str(YAML)!r}) == []
assert accel_fsdp.plan({MODEL!r}, "8xH100-80GB").yaml()
assert "DEEPSPEED" in accel_fsdp.migrate({str(YAML)!r}, "zero3", layer_class="LlamaDecoderLayer").text
assert "fsdp_version: 2" in accel_fsdp.to_yaml({{"model": {MODEL!r}, "gpus": "8xH100-80GB"}})
try:
    accel_fsdp.plan({str(tmp_path)!r}, "8xH100-80GB")
except accel_fsdp.UserError as error:
    print(error)
"""  # config says on stderr which model it found
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    finished = run([python, "-c", program])
    assert finished.code == 0, finished.output
    assert TRAIN in finished.output.strip().splitlines()[-1]


LLAMA = {
    **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 64},
    **{"intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
}


@pytest.mark.slow(but=4)
@pytest.mark.parametrize(
    "words",
    [
        ["rehearse", YAML],
        ["config", "--yes", "--model", "FOLDER", "--gpus", "8xH100-80GB", "-o", "OUT"],
        ["config", "--yes", "--model", "nobody/knows-it", "--gpus", "8xH100-80GB", "-o", "OUT"],
        ["plan", "--model", "FOLDER", "--gpus", "8xH100-80GB", "--html", "OUT"],
        ["check", "--model", "FOLDER", YAML],
        ["launch", YAML, SFT],
        ["export", "RUN", "OUT"],
        ["export", "--check", "RUN"],
        ["export", "RUN", "OUT", "--verify", "bytes"],
    ],
    ids=lambda words: " ".join(str(word) for word in words if "/" not in str(word)),
)
def test_a_command_that_needs_more_says_so_in_one_line(
    words: list[str], light: Any, sharded: Path, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA))
    places = {"FOLDER": tmp_path / "model", "OUT": tmp_path / "out", "RUN": sharded}
    before = sorted(tmp_path.rglob("*"))
    finished = light(*(places.get(str(word), word) for word in words))
    errors = [line for line in finished.output.splitlines() if line.startswith("error: ")]
    assert finished.code == (2 if words[0] == "check" else 1), finished.output  # of a check, 1 is about the file
    assert len(errors) == 1, finished.output
    assert TRAIN in errors[0]
    assert "Traceback" not in finished.output
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "words",
    [
        ["config", "--yes", "--model", "Llama-2-7", "--gpus", "8xH100-80GB", "-o", "OUT"],
        ["plan", "--model", "Llama-2-7", "--gpus", "8xH100-80GB"],
        ["check", "--model", "meta-lama/Llama-2-7", YAML],
    ],
    ids=lambda words: str(words[0]),
)
def test_a_misspelt_model_is_held_against_the_bundled_ones(
    words: list[str], light: Any, sharded: Path, tmp_path: Path
) -> None:
    places = {"OUT": tmp_path / "out", "RUN": sharded}
    finished = light(*(places.get(str(word), word) for word in words))
    assert finished.code == (2 if words[0] == "check" else 1), finished.output
    assert "Did you mean meta-llama/Llama-2-7b-hf?" in " ".join(finished.output.split()), finished.output
    assert TRAIN in finished.output
    assert not any(tmp_path.iterdir())


def test_extras_name_what_they_bring() -> None:
    """Each library that the light set lacks belongs to an extra that the metadata have."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {
        name: {canonicalize_name(Requirement(word).name) for word in words}
        for name, words in project["optional-dependencies"].items()
    }
    for library, extra in LIBRARIES.items():
        if library != "tokenizers":  # it comes with transformers
            assert library in extras[extra], library
