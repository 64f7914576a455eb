"""What the page in a browser asks of the planner, asked without one: `test_site.py` has the page itself."""

import json
import shutil
import subprocess
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, accel_fsdp

from accel_fsdp import api
from accel_fsdp.errors import NotInstalled
from accel_fsdp.hardware import gpus, machines
from accel_fsdp.planner import PlanCommand, browser
from accel_fsdp.prediction import trace_store


def asked(**given: str) -> list[dict[str, Any]]:
    inputs = {name.replace("_", "-"): value for name, value in given.items()}
    return [json.loads(message) for message in browser.answer(json.dumps(inputs))]


def first(**given: str) -> dict[str, Any]:
    """The first message alone: an error, or the answer, which is there before any figure is drawn."""
    answer: dict[str, Any] = json.loads(next(browser.answer(json.dumps(given))))
    return answer


def test_each_flag_is_on_the_page_or_left_out_on_purpose() -> None:
    """A new flag of the command has to be given a label, or a place among those that a page can't have."""
    files_and_prints = {"config", "output", "json", "html", "force", "args", "prices"}
    of_a_written_job = {"compare", "dataset_rows", "epochs", "disk_speed", "eval_rows"}
    recorded_with_torch = {"kernels", "search"}
    left_out = files_and_prints | of_a_written_job | recorded_with_torch
    assert {*browser.LABELS, *left_out} == {field.name for field in fields(PlanCommand)}
    assert not browser.LABELS.keys() & left_out


@pytest.mark.parametrize("card", browser.cards())
def test_each_card_of_the_form_is_one_of_the_table(card: str) -> None:
    machine, _ = machines.parse(f"8x{card}")
    assert machine.accelerator is not None
    assert gpus.find(machine.accelerator, machine.memory_gib) in gpus.GPUS


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a browser: nothing can be recorded."""
    monkeypatch.setattr(trace_store, "cached_or_recorded", refuse)


def refuse(*_: object) -> None:
    raise NotInstalled.of("torch")


@pytest.mark.usefixtures("without_torch")
def test_each_choice_of_the_form_needs_no_torch() -> None:
    for field in browser.form():
        for choice in (*field.choices, *(["true"] if field.kind == "switch" else [])):
            assert "section" in first(model="gpt2", gpus="2xA100", batch="1", **{field.name: choice})


@pytest.mark.usefixtures("without_torch")
def test_choices_that_meet_need_no_torch_but_adapters_in_float32() -> None:
    choices = [field.choices for field in browser.form() if field.name in ("method", "precision", "dtype")]
    late = []
    for method, precision, dtype in product(*choices):
        answer = first(model="gpt2", gpus="2xA100", batch="1", method=method, precision=precision, dtype=dtype)
        late += [(method, precision)] if "This choice isn't" in str(answer.get("error")) else []
    assert {precision for _, precision in late} == {"no"}
    assert "full" not in {method for method, _ in late}


def test_the_answer_is_the_commands() -> None:
    head, table, figure, plan, *sections = asked(model="gpt2", gpus="2xA100-40GB", seq_len="512", method="lora")
    report = api.plan("gpt2", "2xA100-40GB", seq_len=512, method="lora")
    assert json.loads(plan["plan"]["json"]) == json.loads(json.dumps(report.as_json()))
    assert plan["plan"]["yaml"] == report.yaml()
    assert plan["plan"]["command"] == "accel-fsdp plan --model gpt2 --gpus 2xA100-40GB --seq-len 512 --method lora"
    assert all(set(section) == {"section"} for section in (head, table, figure, *sections))
    assert report.answer()[0] in head["section"]
    assert "<table" in table["section"]
    assert "<figure" in figure["section"]


def test_the_table_made_with_the_page_is_the_answers_beginning() -> None:
    first_sections = [message["section"] for message in asked(model="openai-community/gpt2", gpus="2xA100-40GB")[:2]]
    assert browser.summary("openai-community/gpt2", "2xA100-40GB") == first_sections


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"model": "gpt2", "gpus": "2xA100", "seq_len": "9999"}, "--seq-len 9999 is longer than the 1024 positions"),
        ({"model": "gpt2", "gpus": "2xA100", "seq_len": "many"}, "--seq-len takes a whole number, not many"),
        ({"model": "gpt2", "gpus": "2xA100", "seq_length": "9"}, "Did you mean --seq-len?"),
        ({"model": "gpt2", "gpus": "8xH10"}, "Did you mean H100?"),
        ({"model": "gpt2", "gpus": "0xH100"}, "--gpus 0xH100 can't be read"),
        ({"model": "gpt2", "gpus": "2xA100", "chunked_loss": "no"}, "--chunked-loss takes no value, but no was given"),
        ({"model": "gpt2", "gpus": "2xA100", "method": "dora"}, "--method takes one of full, lora, qlora, not dora"),
        ({"model": "gpt2"}, "--gpus is missing"),
        ({"model": "gpt2", "gpus": "2xA100", "seq_len": "--help"}, "--seq-len takes a whole number, not --help"),
        ({"model": "gpt2", "gpus": "2xA100", "dtype": "--json"}, "--dtype takes one of float32, bfloat16, float16"),
    ],
    ids=lambda word: " ".join(word.values()) if isinstance(word, dict) else "",
)
def test_what_the_command_refuses_the_page_refuses(given: dict[str, str], what: str) -> None:
    [message] = asked(**given)
    error = message["error"]
    assert what in error["what"]
    assert error["why"]
    assert error["fix"]
    words = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    refused = accel_fsdp("plan", *words)
    assert refused.code != 0
    if "gpus" in given:
        assert what in " ".join(refused.output.split())


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"model": "Llama-2-7"}, "Did you mean meta-llama/Llama-2-7b-hf?"),
        ({"model": "."}, ". isn't on this page"),
        ({"kernels": "liger"}, "--kernels isn't on this page"),
        ({"config": "/etc/passwd"}, "--config isn't on this page"),
        ({"attention": "eager"}, "This choice isn't on this page"),
    ],
    ids=lambda word: " ".join(word.values()) if isinstance(word, dict) else "",
)
def test_what_takes_torch_or_files_is_told_to_the_command(given: dict[str, str], what: str) -> None:
    [message] = asked(**{"model": "gpt2", "gpus": "2xA100", **given})
    assert what in message["error"]["what"]
    assert "accel-fsdp plan --model" in message["error"]["fix"]


def test_a_mistake_of_the_planner_is_told_as_an_error_and_not_as_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def stops(_: object) -> None:
        raise KeyError("lost")

    monkeypatch.setattr(browser, "make_plan", stops)
    [message] = asked(model="gpt2", gpus="2xA100")
    assert message["error"]["what"] == "The planner stopped: KeyError: 'lost'"
    assert "report it" in message["error"]["fix"]


@pytest.mark.skipif(not shutil.which("node"), reason="the worker is JavaScript")
def test_where_python_could_not_be_loaded_every_question_is_told_so(tmp_path: Path) -> None:
    """A page that asks again would wait for an answer forever."""
    script = tmp_path / "asks.mjs"
    script.write_text(
        f"""
        globalThis.self = globalThis;
        const said = [];
        globalThis.postMessage = (message) => said.push(message);
        globalThis.fetch = async () => {{ throw new Error("blocked"); }};
        await import({json.dumps((ROOT / "web/worker.js").as_uri())});
        await self.onmessage({{ data: {{ site: "http://localhost/", build: "1" }} }});
        await self.onmessage({{ data: {{ id: 1, inputs: "{{}}" }} }});
        await self.onmessage({{ data: {{ id: 2, inputs: "{{}}" }} }});
        console.log(JSON.stringify(said));
        process.exit(0);
        """
    )
    ran = subprocess.run(["node", script], capture_output=True, text=True, check=True, timeout=60)
    failed = [message["failed"] for message in json.loads(ran.stdout)]
    assert len(failed) == 3
    assert all(message.startswith("The planner stopped: ") for message in failed)
