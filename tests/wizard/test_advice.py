"""What the plan tells the wizard: the choice of checkpointing and offload, and whether the result fits."""

import json
import re
from pathlib import Path

import pytest
from conftest import ROOT, here

from accel_fsdp import cli
from accel_fsdp.config import STRATEGIES
from accel_fsdp.units import GIB
from accel_fsdp.wizard import interview, recommended


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
    planned = json.loads(here("plan", "--model", model, "--gpus", gpus, "--method", method, "--json").output)
    choice = planned["choice"]
    needed, speed = f"{choice['needed_bytes'] / GIB:,.1f}", f"{choice['tokens_per_s_per_gpu']:,.0f}"
    number = next(number for number, name in STRATEGIES.items() if choice["strategy"].split()[1] == name)
    assert (answers.strategy, answers.batch) == (number, choice["batch_per_gpu"])
    assert recommended.note(number, context) == f", {needed} GiB, {speed} tokens/s"


def test_a_strategy_that_does_not_fit_is_marked() -> None:
    flags = {"model": "llama-3.1-70b", "gpus": "2xA100-80GB"}
    context = interview.interview(flags, {}, defaults=True).settled(until="strategy")
    assert re.fullmatch(r", [\d.]+ GiB: doesn't fit", recommended.note(2, context))


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
