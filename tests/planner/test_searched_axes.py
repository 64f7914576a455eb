"""The search divides layers and experts where FSDP alone doesn't fit, and proposes what `config` and sft.py take."""

import contextlib
import io
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import accel_fsdp
from transformers import AutoConfig

from accel_fsdp import cli
from accel_fsdp.config import Engine, JobConfig
from accel_fsdp.errors import NotInstalled
from accel_fsdp.job import Job, Layout, Recipe, from_yaml
from accel_fsdp.models import catalogue
from accel_fsdp.planner import PlanCommand, browser, command
from accel_fsdp.planner.proposal import Proposer
from accel_fsdp.prediction import meshes, search, trace_store
from accel_fsdp.training import mesh

LLAMA, SMALL, MIXTURE = "meta-llama/Llama-3.1-405B", "meta-llama/Llama-3.2-1B", "deepseek-ai/DeepSeek-R1"


def planned(*flags: str | Path) -> dict[str, Any]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        cli.call(["plan", *map(str, flags), "--json"])
    content: dict[str, Any] = json.loads(printed.getvalue())
    return content


def axes_in(content: dict[str, Any]) -> set[tuple[int, int]]:
    return {(row["tensor_parallel"], row["expert_parallel"]) for row in content["strategies"]}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("model", "gpus", "method"), [(LLAMA, "128x8xL4", "full"), (MIXTURE, "4x8xH100-80GB", "lora")])
def test_a_layer_that_does_not_fit_is_divided(model: str, gpus: str, method: str, tmp_path: Path) -> None:
    """The proposed command is accepted by config, check and train/sft.py, and its plan has the same peak."""
    asked = ("--model", model, "--gpus", gpus, "--method", method, "--batch", "1")
    asked += ("--seq-len", "512", "--host-memory", "2000")
    flags = PlanCommand(model, gpus, method=method, batch=1, seq_len=512, host_memory=2000, search="plain")
    plain = search.best(command.search_problem(flags)[0])
    assert plain is None or plain.layout.offload
    content = planned(*asked)
    choice, script = content["choice"], content["script_arguments"]
    assert choice["fits"] == "yes"
    assert (choice["tensor_parallel"] > 1, choice["expert_parallel"] > 1) == (method == "full", method == "lora")
    path, line = tmp_path / "fsdp.yaml", tmp_path / "line"
    words = shlex.split(content["config_command"])
    finished = accel_fsdp("config", "--yes", "-o", path, *words[5:])
    assert finished.code == 0, finished.output
    line.write_text(shlex.join(["train/sft.py", *(f"--{name}={value}" for name, value in script.items())]))
    checked = accel_fsdp("check", path, "--args", line, "--model", model)
    assert checked.code == 0, checked.output
    job = from_yaml.predictable(JobConfig(yaml.safe_load(path.read_text())), script)
    config = AutoConfig.for_model(**catalogue.entries()[model]["config"])
    mesh.check_on(job.layout, config, job.recipe.method)
    judged = planned(*asked, "--config", path, "--checkpointing", choice["checkpointing"])["strategies"][0]
    assert (judged["strategy"], judged["peak_bytes"]) == (choice["strategy"], choice["peak_bytes"])


def test_the_answer_for_a_small_model_stays() -> None:
    asked = ("--model", SMALL, "--gpus", "2xH100")
    plain, every = planned(*asked, "--search", "plain"), planned(*asked, "--search", "all")
    assert planned(*asked) == plain
    assert axes_in(plain) == {(1, 1)}
    assert axes_in(every) == {(1, 1), (2, 1)}
    assert every["choice"] == plain["choice"]


def meshes_of(model: str, gpus: str, **flags: Any) -> set[str]:
    problem, _ = command.search_problem(PlanCommand(model, gpus, **flags))
    return {job.layout.name.removeprefix("FSDP2 ") for job in meshes(problem)}


def test_only_what_train_sft_takes_is_tried() -> None:
    """Adapters need whole layers; heads, experts and the rows of a tied table are shared out evenly."""
    mixtral = "mistralai/Mixtral-8x7B-v0.1"
    assert meshes_of(mixtral, "4xH100", method="lora") == {"FULL_SHARD, ep 2", "FULL_SHARD, ep 4"}
    assert meshes_of(mixtral, "4xH100", method="qlora") == meshes_of(mixtral, "4xT4") == set()
    assert meshes_of(mixtral, "4xH100", chunked_loss=True) == meshes_of("gpt2", "4xH100") == set()
    assert "tp 2, ep 2" in meshes_of(mixtral, "2xH100")
    assert meshes_of("HuggingFaceTB/SmolLM2-135M", "4xH100") == set()  # 9 heads
    assert meshes_of(SMALL, "2x6xH100") == {"FULL_SHARD, tp 2", "HYBRID_SHARD, tp 2"}


def test_a_model_of_one_s_own_is_proposed_with_its_axes() -> None:
    job = Job(Layout(Engine.FSDP2, 1, 8, 8, tensor=2, experts=8), Recipe())
    proposer = Proposer("./mine", "8xH100", 8, ("MineDecoderLayer",), 2048)
    assert proposer.refuses(job) == ""
    assert "--tp 2 --ep 8" in proposer.command(job)


@pytest.mark.parametrize(
    ("model", "gpus", "words"),
    [
        ("meta-llama/Llama-3.1-8B", "4xRTX4090", "none of 2 ways fits without CPU offload"),
        ("HuggingFaceTB/SmolLM2-135M", "2xH100", "no size suits this model and these flags"),
    ],
)
def test_a_search_for_meshes_says_why_it_shows_none(model: str, gpus: str, words: str) -> None:
    finished = accel_fsdp("plan", "--model", model, "--gpus", gpus, "--search", "all")
    assert f"(--search all): {words}" in " ".join(finished.output.split())


def test_a_search_beside_a_yaml_is_refused(tmp_path: Path) -> None:
    refused = accel_fsdp("plan", "--config", tmp_path / "fsdp.yaml", "--search", "all")
    assert refused.code == 2
    assert "--search beside --config" in refused.output


def test_without_torch_the_plan_says_what_it_did_not_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's command then finds what the page shows."""

    def lack(purpose: str, *libraries: str) -> None:
        raise NotInstalled.of(libraries[0], purpose)

    monkeypatch.setattr(trace_store, "require", lack)
    inputs = {"model": "Qwen/Qwen3-30B-A3B", "gpus": "8xH100", "seq-len": "1024", "batch": "1"}
    messages = [json.loads(line) for line in browser.answer(json.dumps(inputs))]
    (plan,) = (message["plan"] for message in messages if "plan" in message)
    assert plan["command"].endswith(" --search plain")
    assert any("was not tried: recording what that allocates takes torch" in str(message) for message in messages)
    content = planned("--model", inputs["model"], "--gpus", inputs["gpus"], "--seq-len", "1024", "--batch", "1")
    assert axes_in(content) == {(1, 1)}
    with pytest.raises(NotInstalled):
        planned("--model", inputs["model"], "--gpus", inputs["gpus"], "--search", "all")
