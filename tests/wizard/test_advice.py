"""What the plan tells the wizard: the choice of checkpointing and offload, and whether the result fits."""

import json
import re
from pathlib import Path

import pytest
from conftest import ROOT, accel_fsdp

from accel_fsdp import cli
from accel_fsdp.config import STRATEGIES
from accel_fsdp.errors import UsageError
from accel_fsdp.hardware import gpus, machines
from accel_fsdp.units import GIB
from accel_fsdp.wizard import QUESTIONS, interview, notes


@pytest.mark.parametrize(
    ("words", "count", "name", "gib"),
    [
        ("8xA100", 8, "A100", 79.25),
        ("8xA100-80GB", 8, "A100", 79.25),
        ("A100-80GB", 1, "A100", 79.25),
        ("h100", 1, "H100", 79.1),
        ("2x4090", 2, "RTX 4090", 23.64),
        ("1x3090", 1, "RTX 3090", 23.68),
        ("RTX4090", 1, "RTX 4090", 23.64),
        ("8xT4", 8, "T4", 14.75),
    ],
)
def test_a_gpu_is_the_same_by_every_name(words: str, count: int, name: str, gib: float) -> None:
    machine, _ = machines.parse(words)
    assert machine.accelerator is not None
    gpu = gpus.find(machine.accelerator, machine.memory_gib)
    assert (machine.count, gpu.name, gpu.usable_gib) == (count, name, gib)


def test_no_gpu_has_all_the_memory_that_is_sold() -> None:
    for gpu in gpus.GPUS:
        sold = gpu.memory_gib * (15 / 16 if gpu.name in gpus.INLINE_ECC else 1)
        assert 0.975 * sold < gpu.usable_gib < 0.995 * sold
    assert gpus.find("NVIDIA H100 80GB HBM3", 79.18).usable_gib == 79.18  # a driver's own word


def test_one_number_says_what_a_gpu_has() -> None:
    shown = accel_fsdp("plan", "--model", "llama-3.1-8b", "--gpus", "8xT4").output
    assert "14.8 GiB" in shown
    assert "16 GiB" not in shown
    content = json.loads(accel_fsdp("plan", "--model", "llama-3.1-8b", "--gpus", "8xT4", "--json").output)
    assert content["gpu_memory_usable_bytes"] == round(14.75 * GIB)


@pytest.mark.parametrize(
    ("model", "gpus", "method"),
    [
        ("llama-3.1-8b", "8xH100", "full"),
        ("llama-3.1-70b", "4x8xA100-80GB", "full"),
        ("Qwen/Qwen3-32B", "4xA100-80GB", "lora"),
        ("Qwen/Qwen3-32B", "4x8xA100-40GB", "full"),
        ("gpt2", "8xH100", "full"),
    ],
)
def test_the_wizard_proposes_and_shows_what_the_plan_recommends(model: str, gpus: str, method: str) -> None:
    flags = {"model": model, "gpus": gpus, "method": method} | (
        {"main_process_ip": "10.0.0.1"} if "x8x" in gpus else {}
    )
    session = interview.interview(flags, {}, defaults=True)
    answers, context = interview.answers(session), session.settled(until="strategy")
    planned = json.loads(accel_fsdp("plan", "--model", model, "--gpus", gpus, "--method", method, "--json").output)
    choice = planned["choice"]
    needed, speed = f"{choice['needed_bytes'] / GIB:,.1f}", f"{choice['tokens_per_s_per_gpu']:,.0f}"
    number = next(number for number, name in STRATEGIES.items() if choice["strategy"].split()[1] == name)
    assert (answers.strategy, answers.batch) == (number, choice["batch_per_gpu"])
    assert notes.note(number, context) == f", {needed} GiB, {speed} tokens/s"
    question = next(question for question in QUESTIONS if question.field == "strategy")
    capacity = f"{planned['gpu_memory_usable_bytes'] / GIB:,.1f} GiB"
    assert f"needs {needed} of {capacity}" in question.default(context)[1]


def test_a_strategy_that_does_not_fit_is_marked() -> None:
    flags = {"model": "llama-3.1-70b", "gpus": "2xA100-80GB"}
    context = interview.interview(flags, {}, defaults=True).settled(until="strategy")
    assert re.fullmatch(r", [\d.]+ GiB: doesn't fit", notes.note(2, context))


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        ("8xH9000-80GB", "H9000 is an unknown GPU. Did you mean H800? Its speed is not predicted"),
        ("8xQ7-80GB", "Q7 is an unknown GPU. Its speed is not predicted"),
        ("8xH100-80GB", ""),
        ("8xNVIDIA A100-80GB", ""),
    ],
)
def test_a_gpu_outside_the_table_is_named_as_the_plan_does(
    machine: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", "llama-3.1-8b", "--gpus", machine]
    assert cli.call(["config", "--yes", *words, "-o", str(tmp_path / "made.yaml")]) == 0
    printed = " ".join(capsys.readouterr().err.split())
    assert said in printed
    assert ("unknown GPU" in printed) == bool(said)
    assert ("its memory is taken from" in printed) == bool(said)
    if said:
        with pytest.raises(UsageError) as refused:
            cli.call(["plan", *words])
        assert refused.value.what in printed


@pytest.mark.parametrize("command", ["config --yes", "plan"])
def test_a_launch_line_says_which_of_its_files_are_not_here(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def printed(folder: Path) -> str:
        monkeypatch.chdir(folder)
        words = [*command.split(), "--model", "llama-3.1-8b", "--gpus", "8xH100-80GB"]
        made = tmp_path / f"{len(list(tmp_path.iterdir()))}.yaml"
        assert cli.call([*words, "-o", str(made)]) == 0
        return " ".join(capsys.readouterr().err.split())

    script = "train/sft.py is not in this folder: accel-fsdp init . copies it"
    data = "train/data/fsdp_chat is not in this folder: name data of your own"
    assert f"note: {script}; {data}" in printed(tmp_path)
    assert cli.call(["init", str(tmp_path)]) == 0
    capsys.readouterr()
    started = printed(tmp_path)
    assert script not in started
    assert f"note: {data}" in started
    assert "not in this folder" not in printed(ROOT)
