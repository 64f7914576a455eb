"""Hours and money of a job, and machines beside each other: through the command, by hand."""

import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from conftest import here, planned
from hypothesis import given
from hypothesis import strategies as st

import accel_fsdp as package
from accel_fsdp.errors import UserError
from accel_fsdp.job import from_arguments
from accel_fsdp.planner import workload
from accel_fsdp.prediction import RANGE
from accel_fsdp.units import two_digits

LLAMA = ("--model", "llama-3.1-8b")
H100S = (*LLAMA, "--gpus", "8xH100-80GB", "--seq-len", "4096")
ARGUMENTS = {
    "model_name_or_path": "meta-llama/Llama-3.1-8B",
    "max_length": 2048,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 2,
    "max_steps": 1000,
    "save_steps": 300,
    "save_total_limit": 2,
}


@pytest.fixture
def job(tmp_path: Path) -> Any:
    """Writes a YAML of two machines with eight GPUs each, and the arguments of its script; returns the flags."""
    file, args = tmp_path / "job.yaml", tmp_path / "args.json"
    file.write_text(
        package.to_yaml({"model": "meta-llama/Llama-3.1-8B", "gpus": "2x8xH100-80GB", "main_process_ip": "first"})
    )

    def write(**arguments: object) -> tuple[str | Path, ...]:
        args.write_text(json.dumps({**ARGUMENTS, **arguments}))
        return (*LLAMA, "--gpus", "2x8xH100-80GB", "--config", file, "--args", args)

    return write


def test_steps_hours_and_money_are_those_of_the_step() -> None:
    """What is said of them has two digits and a range."""
    words = (*H100S, "--tokens", "2B", "--price", "2.5")
    report = planned(*words)
    choice, spent = report["choice"], report["cost"]
    assert spent["steps"] == math.ceil(2_000_000_000 / (choice["global_batch"] * 4096))
    assert spent["tokens"] == spent["steps"] * choice["global_batch"] * 4096
    hours = spent["steps"] * choice["step_seconds"] * RANGE[1] / 3600
    assert spent["hours_at_most"] == pytest.approx(hours)
    assert spent["gpu_hours_at_most"] == pytest.approx(8 * hours)
    assert spent["money_at_most"] == pytest.approx(20 * hours)
    text = here("plan", *words, "--details").text
    assert f" {two_digits(hours * RANGE[0] / RANGE[1])} to {two_digits(hours)} hours;" in text
    assert "exporting come on top" in text


def test_two_digits() -> None:
    said = {8.72: "8.7", 12.6: "13", 1349: "1,300", 99.6: "100", 0.0123: "0.012", 0.0996: "0.10", 0: "0"}
    assert {amount: two_digits(amount) for amount in said} == said


@given(st.integers(1, 999), st.integers(0, 999), st.sampled_from("KMBTkmbt"))
def test_a_count_with_a_unit(whole: int, thousandths: int, unit: str) -> None:
    exact = Fraction(whole * 1000 + thousandths, 1000) * {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}[unit.lower()]
    assert workload.count_of(f"{whole}.{thousandths:03}{unit}") == exact


@pytest.mark.parametrize("text", ["1,5B", "1,50", "12,34,567", "1,5000", "1_0,0", "1000,000"])
def test_a_comma_that_parts_no_thousands_is_refused(text: str) -> None:
    """Half the world writes 1.5 so: ten times as many tokens would be a plan for another job."""
    with pytest.raises(UserError, match="is not a number of tokens"):
        workload.count_of(text)


def test_the_fastest_are_named_last() -> None:
    """Machines that a prediction can't distinguish are named together; the table has no empty column."""
    lines = here("plan", *LLAMA, "--compare", "8xH100,8xA100-40GB,8xH200,1xT4").output.splitlines()
    titles, *rows = (line.split() for line in lines[:5])
    assert titles == ["machine", "fits", "strategy", "GiB", "tokens/s"]
    assert rows[3] == ["1xT4", "no"]
    speeds = {float(row[-1].replace(",", "")): row[0] for row in rows[:3]}
    near = [speeds[speed] for speed in sorted(speeds, reverse=True) if speed >= RANGE[0] * max(speeds)]
    assert lines[5:] == [f"Fastest: {' or '.join(near)}."]


def test_hours_and_money_are_columns_where_they_are_known() -> None:
    words = (*LLAMA, "--compare", "8xH100,16xH100,1xH100", "--tokens", "1B", "--price", "2.5")
    titles, first, _, last, verdict = here("plan", *words).output.splitlines()
    assert titles.split() == ["machine", "fits", "strategy", "GiB", "tokens/s", "hours", "cost"]
    report = planned(*words)
    costs = [row["cost"]["money_at_most"] for row in report["machines"][:2]]
    assert first.split()[-3:] == [two_digits(costs[0] * RANGE[0] / RANGE[1]), "to", two_digits(costs[0])]
    assert last.split() == ["1xH100", "no"]
    cheapest = [name for _, name in sorted(zip(costs, ("8xH100", "16xH100"), strict=True))]
    assert report["cheapest"] == cheapest  # within the error of a prediction
    assert verdict == f"Fastest: 16xH100. Cheapest: {' or '.join(cheapest)}."


def test_nothing_fits_anywhere() -> None:
    report = planned("--model", "llama-3.1-70b", "--compare", "1xT4,1xL4")
    assert (report["cheapest"], report["fastest"]) == ([], [])
    finished = here("plan", "--model", "llama-3.1-70b", "--compare", "1xT4")
    assert (finished.code, finished.output.splitlines()[-1]) == (1, "Nothing fits.")


def test_the_arguments_decide_the_job(job: Any) -> None:
    """Its batch, steps and hours, which are those of a job file."""
    report = planned(*job(), "--price", "2")
    choice, spent = report["choice"], report["cost"]
    assert (choice["batch_per_gpu"], choice["accumulation"], report["sequence_length"]) == (1, 2, 2048)
    assert spent["steps"] == 1000
    assert spent["hours_at_most"] == pytest.approx(1000 * choice["step_seconds"] * RANGE[1] / 3600)
    assert spent["money_at_most"] == pytest.approx(2 * 16 * spent["hours_at_most"])


def test_epochs_alone_say_no_steps(job: Any) -> None:
    words = job(max_steps=-1, num_train_epochs=2)
    assert planned(*words)["cost"] is None
    assert "The number of steps is unknown" in here("plan", *words).text


def test_a_flag_overrides_the_arguments(job: Any) -> None:
    report = planned(*job(), "--batch", "2", "--method", "lora", "--tokens", "2B")
    choice, spent = report["choice"], report["cost"]
    assert (choice["batch_per_gpu"], choice["accumulation"], report["method"]) == (2, 2, "lora")
    assert spent["steps"] == math.ceil(2_000_000_000 / (choice["global_batch"] * 2048))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"per_device_train_batch_size": -2}, "per_device_train_batch_size: -2 in the arguments"),
        ({"max_steps": "abc"}, "max_steps: abc in the arguments"),
        ({"per_device_train_batch_sise": 2}, "Did you mean per_device_train_batch_size?"),
    ],
)
def test_arguments_that_cannot_be_are_refused(arguments: Any, message: str, job: Any) -> None:
    refused = here("plan", *job(**arguments))
    assert (refused.code, message in refused.text) == (2, True), refused.output


def test_arguments_that_would_fail_are_no_plan(job: Any) -> None:
    """What the linter finds in the arguments themselves, not in those that a plan would write."""
    report = planned(*job(fsdp="full_shard"))
    assert report["choice"] is None
    assert "AF" in report["strategies"][0]["refused"]


def test_what_arguments_say_in_their_other_forms() -> None:
    arguments = {
        "use_peft": "true", "load_in_4bit": False, "lora_target_modules": "q_proj v_proj", "lora_dropout": 0,
        "torch_dtype": "bf16", "optim": "paged_adamw_8bit", "gradient_checkpointing": "True",
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    }  # fmt: skip
    recipe = from_arguments.recipe_of(arguments)
    assert (recipe.method, recipe.lora_targets, recipe.lora_dropout) == ("lora", "attention", False)
    assert (recipe.dtype, recipe.optimizer, recipe.checkpointing) == ("bfloat16", "adamw_8bit", "reentrant")
    assert list(from_arguments.notes({"optim": "lion_32bit"}))
