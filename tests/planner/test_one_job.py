"""One job, one answer: a recipe and its arguments, a file and its header, and what each command says of them."""

import json
import re
import shlex
from dataclasses import fields, replace
from pathlib import Path

import pytest
from conftest import SFT, accelerate_launch, here, planned
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_fsdp.command_line import parse_command_line
from accel_fsdp.config import Engine
from accel_fsdp.job import Job, Layout, Recipe, from_arguments, recompute_by
from accel_fsdp.models import catalogue, optimizers
from accel_fsdp.units import gib_of

FULL = {"lora_rank": Recipe.lora_rank, "lora_targets": Recipe.lora_targets, "lora_dropout": Recipe.lora_dropout}
LAYOUTS = st.builds(
    Layout,
    st.sampled_from([Engine.FSDP1, Engine.FSDP2, Engine.DDP, Engine.DEEPSPEED]),
    st.integers(1, 2),
    st.just(8),
    st.just(8),
    st.booleans(),
    experts=st.sampled_from([1, 8]),
)


def recipes() -> st.SearchStrategy[Recipe]:
    """Recipes of every field; an adapter's fields keep their defaults in full training."""

    def settled(recipe: Recipe) -> Recipe:
        recipe = replace(recipe, offloads_inputs=False)  # the YAML's
        return replace(recipe, **FULL) if recipe.method == "full" else recipe

    return st.builds(
        Recipe,
        **{field.name: ... for field in fields(Recipe)}
        | {
            "rows": st.integers(1, 64),
            "length": st.integers(1, 1 << 17),
            "accumulation": st.integers(1, 64),
            "optimizer": st.sampled_from(sorted(set(optimizers.BY_TRAINERS_NAME.values()))),
            "lora_rank": st.integers(1, 256),
            "eval_batch": st.integers(0, 64),
        },
    ).map(settled)


@settings(max_examples=300)
@given(recipes(), LAYOUTS)
def test_the_arguments_of_a_recipe_are_read_back(recipe: Recipe, layout: Layout) -> None:
    """Through the words of a command line; the YAML has the precision, and FSDP's own checkpointing."""
    job = Job(layout, recipe).settled
    words = from_arguments.argument_words(job)
    read = from_arguments.recipe_of(parse_command_line(words))
    in_yaml = recompute_by(layout.engine, recipe.method) == "engine" and recipe.checkpointing != "none"
    expected = replace(recipe, precision=read.precision, checkpointing="none" if in_yaml else recipe.checkpointing)
    assert read == expected
    assert parse_command_line(words).get("expert_parallel_size", "1") == str(layout.experts)


def test_each_field_of_a_recipe_has_one_row() -> None:
    assert sorted(row.field for row in from_arguments.ROWS) == sorted(field.name for field in fields(Recipe))


def test_the_rows_have_the_defaults_of_the_script() -> None:
    """Without arguments the recipe is that of `train/sft.py`, whose parser says its defaults."""
    from accel_fsdp.training.arguments import ModelArguments, SftArguments
    from accel_fsdp.training.data import DataArguments

    classes = (ModelArguments, SftArguments, DataArguments)
    defaults = {field.name: field.default for kind in classes for field in fields(kind)}
    defaults["optim"] = getattr(defaults["optim"], "value", defaults["optim"])
    known = {"gradient_checkpointing", "use_liger_kernel", "packing", "dtype", "optim", "lora_r", "lora_dropout"}
    known |= {*from_arguments.SIZES, "eval_strategy", "per_device_eval_batch_size", "use_peft", "load_in_4bit"}
    assert known <= defaults.keys()
    said = {name: getattr(defaults[name], "value", defaults[name]) for name in known}
    for method in ({}, {"use_peft": True}, {"use_peft": True, "load_in_4bit": True}):
        assert from_arguments.recipe_of(said | method) == from_arguments.recipe_of(method)


FOLDERS = {"llama": "HuggingFaceTB/SmolLM2-360M", "qwen": "Qwen/Qwen3-0.6B", "gpt": "gpt2"}
"""Local folders, with the configurations of these models under other names."""
MODELS = (*FOLDERS, "llama-3.1-8b", "Qwen/Qwen3-8B", "llama-3.1-70b", "google/gemma-2-9b", "Qwen/Qwen3-30B-A3B")
MACHINES = ("1xA100-40GB", "2x3090", "8xH100-80GB", "4xL40S", "2x8xA100-80GB", "8xT4", "2xMI300X")
METHODS = ("full", "lora", "qlora")
LENGTHS = ("", "1024", "8192")


def sixty() -> list[tuple[str, str, str, str]]:
    """Jobs that go through all models, machines, methods and lengths in different rhythms."""
    return [
        (MODELS[n % len(MODELS)], MACHINES[n % len(MACHINES)], METHODS[n % 3], LENGTHS[n * 7 // 3 % 3])
        for n in range(60)
    ]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    from transformers import AutoConfig

    paths = {name: tmp_path_factory.mktemp("model") / name for name in FOLDERS}
    for name, path in paths.items():
        AutoConfig.for_model(**catalogue.entries()[catalogue.canonical(FOLDERS[name]) or ""]["config"]).save_pretrained(
            path
        )
    return {name: str(path) for name, path in paths.items()}


@pytest.mark.slow(but=8)
@pytest.mark.parametrize(("name", "machine", "method", "length"), sixty())
def test_one_job_has_one_answer(
    name: str, machine: str, method: str, length: str, folders: dict[str, str], tmp_path: Path
) -> None:
    """From the wizard and from the plan, alone or with arguments, when checked, scripted and launched: the same GiB."""
    asked = ["--model", folders.get(name, name), "--gpus", machine, "--method", method]
    asked += ["--seq-len", "1024" if name in folders else length] if length else []
    path, line = tmp_path / "fsdp.yaml", tmp_path / "arguments"
    assert here("config", "--yes", *asked, "-o", path).code == 0
    plan = planned(*asked)
    code = 0 if plan["choice"] else 1
    [row] = planned("--config", path)["strategies"]
    judged = planned("--config", path, "--args", line_of(path, line))
    assert judged["strategies"] == [row]
    assert bool(judged["choice"]) == bool(plan["choice"])
    if plan["choice"]:
        chosen = {**plan["choice"], "assumptions": row["assumptions"]}
        assert chosen == row
        script, words = plan["script_arguments"], parse_command_line(shlex.split(line.read_text()))
        assert script == {name: type(script[name])(value) for name, value in words.items() if name in script}
    needed = gib_of(row["needed_bytes"], plan["gpu_memory_usable_bytes"])
    for words in (("check", path), ("script", "slurm", path, SFT), launched(path)):
        said = " ".join(here(*words).output.split())
        assert bool(re.search("predicted (not to fit|to fit without)", said)) == (code == 1), said
        assert code == 0 or row["refused"] or needed in said


def line_of(path: Path, line: Path) -> Path:
    """The launch command in the header of a YAML, in a file."""
    lines = path.read_text().splitlines()
    line.write_text(lines[lines.index("# Launch:") + 1].removeprefix("#"))
    return line


def launched(path: Path) -> tuple[str | Path, ...]:
    address = ("--machine-rank", "0", "--main-process-ip", "127.0.0.1") if "num_machines: 2" in path.read_text() else ()
    return ("launch", "--dry-run", *address, path, SFT)


@pytest.fixture
def lora(tmp_path: Path) -> Path:
    """A YAML of the wizard for an adapter, whose header has the arguments."""
    path = tmp_path / "lora.yaml"
    words = ("--model", "llama-3.1-8b", "--gpus", "8xH100-80GB", "--method", "lora", "-o", path)
    assert here("config", "--yes", *words).code == 0
    return path


def test_trls_own_command_has_trls_defaults(lora: Path, tmp_path: Path) -> None:
    flags, shown = "--model_name_or_path meta-llama/Llama-3.1-8B --use_peft --per_device_train_batch_size 4", []
    for start, more in (("trl sft", ""), ("train/sft.py", "--gradient_checkpointing true --dtype float32")):
        (tmp_path / "command.txt").write_text(f"{start} {flags} {more}\n")
        words = ("--gpus", "2xRTX3090-24GB", "--config", lora, "--args", tmp_path / "command.txt")
        shown.append(here("plan", *words).output.replace(start, ""))
    assert shown[0] == shown[1]


def test_the_headers_arguments_are_completed_by_those_given(lora: Path, tmp_path: Path) -> None:
    """In launch and script; a script of one's own gets what was typed, and nothing else."""
    shown = here("launch", "--dry-run", lora, SFT, "--max_length", "4096").output
    assert f"arguments: those given, and the others from the header of {lora}" in shown
    assert "--use_peft true" in shown
    assert "--max_length 4096" in shown
    assert "--max_length 2048" not in shown
    own = tmp_path / "own.py"
    own.write_text("print()\n")
    assert "--use_peft" not in here("launch", "--dry-run", lora, own, "--max_length", "4096").output
    assert "--use_peft true" in " ".join(here("script", "slurm", lora, SFT).output.split())


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_run_started_by_copied_lines_is_the_job_that_was_planned(
    method: str, tiny_model: Path, text_data: Path, tmp_path: Path
) -> None:
    """Two ranks on CPU, from the printed command and the launch command in the file that it writes."""
    asked = ("--model", tiny_model, "--gpus", "2xA100-40GB", "--method", method, "--batch", "2", "--seq-len", "64")
    plan = planned(*asked)
    choice, path, out = plan["choice"], tmp_path / "fsdp.yaml", tmp_path / "run"
    words = shlex.split(plan["config_command"])
    assert here(*words[1 : words.index("-o")], "-o", path, *words[words.index("-o") + 2 :]).code == 0
    line = shlex.split(line_of(path, tmp_path / "line").read_text())
    script = line[line.index("train/sft.py") + 1 :]
    more = ("--dataset_name", text_data, "--output_dir", out, "--max_steps", "1", "--report_to", "none")
    finished = accelerate_launch(path, SFT, *script, *more)
    assert finished.code == 0, finished.output
    ran = json.loads((out / "run.json").read_text())
    recipe, arguments = ran["plan"]["recipe"], ran["arguments"]["training"] | ran["arguments"]["data"]
    assert Layout(**ran["plan"]["layout"]).name == choice["strategy"]
    assert (arguments["per_device_train_batch_size"], arguments["max_length"]) == (2, 64)
    assert (recipe["method"], recipe["precision"], recipe["checkpointing"]) == (method, "bf16", choice["checkpointing"])
    assert (recipe["accumulation"], recipe["lora_dropout"]) == (choice["accumulation"], method == "lora")
    expected = from_arguments.recipe_of(parse_command_line(script))
    assert Recipe(**recipe, rows=expected.rows, length=expected.length) == replace(expected, precision="bf16")
