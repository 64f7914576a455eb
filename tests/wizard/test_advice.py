"""What the plan tells the wizard: the choice of checkpointing and offload, and whether the result fits."""

import json
from pathlib import Path

import pytest
from conftest import ROOT, accel_fsdp

from accel_fsdp import cli
from accel_fsdp.config import STRATEGIES, Engine, Method
from accel_fsdp.errors import UsageError
from accel_fsdp.hardware import gpus, machines
from accel_fsdp.job import Layout
from accel_fsdp.prediction import advice
from accel_fsdp.units import GIB
from accel_fsdp.wizard import Context, interview, notes


@pytest.mark.parametrize(
    ("model", "machine", "count", "checkpointing", "offload"),
    [
        ("Qwen/Qwen3-32B", "8xA100-40GB", 4, True, False),
        ("llama-3.1-8b", "8xH100", 1, False, False),
        ("llama-3.1-8b", "8xT4", 1, True, True),
    ],
)
def test_the_advice_is_what_plan_says_of_the_yaml_that_follows_it(
    model: str, machine: str, count: int, checkpointing: bool, offload: bool, tmp_path: Path
) -> None:
    machine_facts, _ = machines.parse(machine)
    problem = advice.problem_of(
        model, machine_facts, Layout(Engine.FSDP2, 1, machine_facts.count * count, machine_facts.count)
    )
    assert problem is not None
    advised = advice.advise(problem)
    assert (advised.recipe.recomputes, advised.layout.offload, advised.fits) == (checkpointing, offload, True)
    path, number = tmp_path / "fsdp.yaml", str(count)
    switched = {True: "true", False: "false"}
    config = ("config", "--yes", "-o", path, "--model", model, "--gpus", machine, "--num-machines", number)
    where = ("--main-process-ip", "10.0.0.1") if count > 1 else ()
    how = ("--cpu-offload", switched[offload], "--activation-checkpointing", switched[checkpointing])
    assert accel_fsdp(*config, *where, *how).code == 0
    judged = accel_fsdp("plan", "--config", path, "--model", model, "--gpus", machine, "--nodes", number, "--json")
    row = json.loads(judged.output)["strategies"][0]
    assert (row["fits"], row["peak_bytes"]) == ("yes", advised.prediction.peak.total)


@pytest.mark.parametrize(("method", "verdict"), [("full", "no"), ("qlora", "yes")])
def test_what_does_not_fit_is_said(method: Method, verdict: str) -> None:
    machine_facts, _ = machines.parse("1xA100-80GB")
    problem = advice.problem_of("meta-llama/Llama-3.1-70B", machine_facts, Layout.alone(), method)
    assert problem is not None
    advised = advice.advise(problem)
    assert advised.verdict == verdict
    assert advised.words.startswith(f"needs {advised.device.needed / GIB:,.1f} of 79.2 GiB")
    assert not advised.layout.offload  # one GPU has no other to shard with


def test_there_is_no_advice_without_the_model_or_the_gpu() -> None:
    layout = Layout(Engine.FSDP2, 1, 8, 8)
    assert advice.problem_of("me/unheard-of", machines.parse("8xH100")[0], layout) is None
    assert advice.problem_of("gpt2", machines.parse("8xH1OO")[0], layout) is None
    assert advice.problem_of("gpt2", machines.CPU, layout) is None


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
    assert gpus.find("A100", 64).usable_gib == pytest.approx(64 * 0.985)


def test_one_number_says_what_a_gpu_has() -> None:
    shown = accel_fsdp("plan", "--model", "llama-3.1-8b", "--gpus", "8xT4").output
    assert "14.8 GiB" in shown
    assert "16 GiB" not in shown
    content = json.loads(accel_fsdp("plan", "--model", "llama-3.1-8b", "--gpus", "8xT4", "--json").output)
    assert content["gpu_memory_usable_bytes"] == round(14.75 * GIB)


@pytest.mark.parametrize(("gpus", "method"), [("8xH100", "full"), ("4x8xA100-80GB", "lora"), ("4xRTX4090", "qlora")])
def test_the_strategies_of_the_wizard_take_what_the_plan_says(gpus: str, method: str) -> None:
    flags = {"model": "llama-3.1-8b", "gpus": gpus, "method": method, "main_process_ip": "10.0.0.1"}
    if gpus.count("x") == 1:
        del flags["main_process_ip"]
    answers = interview.answers(interview.interview(flags, {}, defaults=True))
    words = ("--model", "llama-3.1-8b", "--gpus", gpus, "--method", method, "--batch", "1", "--json")
    rows = {row["strategy"]: row["peak_bytes"] for row in json.loads(accel_fsdp("plan", *words).output)["strategies"]}
    shown = {
        f"FSDP2 {name}": notes.note("strategy", number, Context(vars(answers))) for number, name in STRATEGIES.items()
    }
    compared = [name for name in shown if name in rows]
    assert len(compared) == (4 if flags.get("main_process_ip") else 2)
    assert [shown[name] for name in compared] == [f", ~{rows[name] / GIB:,.1f} GiB" for name in compared]


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
