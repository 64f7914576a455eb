"""What the page in a browser asks of the planner, asked without one: `test_site.py` has the page itself."""

import json
from unittest import mock

import pytest
from conftest import here

from accel_fsdp import api
from accel_fsdp.errors import NotInstalled
from accel_fsdp.planner import browser
from accel_fsdp.prediction import trace_store


def asked(**given: str) -> dict[str, str]:
    inputs = {name.replace("_", "-"): value for name, value in given.items()}
    answer: dict[str, str] = json.loads(browser.answer(json.dumps(inputs)))
    return answer


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a browser: nothing can be recorded."""
    monkeypatch.setattr(trace_store, "cached_or_recorded", mock.Mock(side_effect=NotInstalled.of("torch")))


@pytest.mark.usefixtures("without_torch")
def test_each_choice_of_the_form_needs_no_torch() -> None:
    for field in browser.form():
        for choice in (*field.choices, *(["true"] if field.flag.is_switch else [])):
            assert asked(model="gpt2", gpus="2xA100", batch="1", **{field.name: choice}).get("json")


def test_the_answer_is_the_commands() -> None:
    answer = asked(model="gpt2", gpus="2xA100-40GB", seq_len="512", method="lora")
    report = api.plan("gpt2", "2xA100-40GB", seq_len=512, method="lora")
    assert json.loads(answer["json"]) == json.loads(json.dumps(report.as_json()))
    assert answer["yaml"] == report.yaml()
    assert answer["command"] == "accel-fsdp plan --model gpt2 --gpus 2xA100-40GB --seq-len 512 --method lora"
    places = [answer["html"].index(word) for word in (report.answer()[0], "<table", "<figure", answer["command"])]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"model": "gpt2", "gpus": "2xA100", "seq_len": "9999"}, "--seq-len 9999 is longer than the 1024 positions"),
        ({"model": "gpt2", "gpus": "2xA100", "seq_len": "many"}, "--seq-len: many is not a whole number"),
        ({"model": "gpt2", "gpus": "2xA100", "seq_length": "9"}, "Did you mean --seq-len?"),
        ({"model": "gpt2", "gpus": "8xH10"}, "Did you mean H100?"),
        ({"model": "gpt2", "gpus": "2xA100", "method": "dora"}, "--method: dora is not one of full, lora, qlora"),
        ({"model": "gpt2"}, "--gpus is missing"),
        ({"model": "gpt2", "gpus": "2xA100", "dtype": "--json"}, "is not one of float32, bfloat16, float16"),
    ],
    ids=lambda word: " ".join(word.values()) if isinstance(word, dict) else "",
)
def test_what_the_command_refuses_the_page_refuses(given: dict[str, str], what: str) -> None:
    assert what in asked(**given)["title"]
    words = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    refused = here("plan", *words)
    assert refused.code == 2
    assert "gpus" not in given or what in refused.text


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"model": "Llama-2-7"}, "Did you mean meta-llama/Llama-2-7b-hf?"),
        ({"model": "."}, ". isn't on this page"),
        ({"config": "/etc/passwd"}, "--config isn't on this page"),
        ({"attention": "eager"}, "This choice isn't on this page"),
    ],
    ids=lambda word: " ".join(word.values()) if isinstance(word, dict) else "",
)
def test_what_takes_torch_or_files_is_referred_to_the_command(given: dict[str, str], what: str) -> None:
    answer = asked(**{"model": "gpt2", "gpus": "2xA100", **given})
    assert what in answer["title"]
    assert "accel-fsdp plan --model" in answer["html"]


def test_a_bug_of_the_planner_is_an_error_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(browser, "make_plan", mock.Mock(side_effect=KeyError("lost")))
    answer = asked(model="gpt2", gpus="2xA100")
    assert answer["title"] == "The planner stopped: KeyError: 'lost'"
    assert "report it" in answer["html"]
