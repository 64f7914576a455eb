"""Hours, energy, money and checkpoints of a job, and machines beside each other: through the command, by hand."""

import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from conftest import accel_fsdp, run
from hypothesis import given, settings
from hypothesis import strategies as st

import accel_fsdp as package
from accel_fsdp.errors import UsageError, UserError
from accel_fsdp.hardware import GPUS, gpus, machines
from accel_fsdp.job import Job, Layout, Recipe, from_arguments
from accel_fsdp.planner import proposal, workload
from accel_fsdp.prediction import RANGE, cost, search
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


def planned(*words: str | Path, code: int = 0) -> dict[str, Any]:
    finished = accel_fsdp("plan", *words, "--json")
    assert finished.code == code, finished.output
    report: dict[str, Any] = json.loads(finished.output)
    return report


def printed(*words: str | Path) -> str:
    """What the command says, in one line."""
    return " ".join(accel_fsdp("plan", *words).output.split())


def or_refused(call: Callable[[], Any]) -> Any:
    """What it returns, or what is wrong."""
    try:
        return call()
    except UsageError as error:
        return error.what


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Writes a YAML of two machines with eight GPUs each, and the arguments of its script; returns the flags."""
    folder = tmp_path_factory.mktemp("job")
    file = folder / "job.yaml"
    text = package.to_yaml({"model": "meta-llama/Llama-3.1-8B", "gpus": "2x8xH100-80GB", "main_process_ip": "first"})

    def write(*changes: tuple[str, str], **arguments: object) -> tuple[str | Path, ...]:
        changed = text
        for old, new in changes:
            assert old in changed
            changed = changed.replace(old, new)
        file.write_text(changed)
        (folder / "args.json").write_text(json.dumps({**ARGUMENTS, **arguments}))
        return (*LLAMA, "--gpus", "2x8xH100-80GB", "--config", file, "--args", folder / "args.json")

    return write


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        (("--tokens", "2B"), lambda batch: math.ceil(2_000_000_000 / (batch * 4096))),
        (("--tokens", "1.5T"), lambda batch: math.ceil(1_500_000_000_000 / (batch * 4096))),
        (("--dataset-rows", "10001", "--epochs", "3"), lambda batch: 3 * math.ceil(10_001 / batch)),
        (("--dataset-rows", "10000", "--epochs", "0.5"), lambda batch: math.ceil(math.ceil(10_000 / batch) / 2)),
    ],
)
def test_steps_hours_energy_and_money_are_those_of_the_step(words: tuple[str, ...], steps: Any) -> None:
    report = planned(*H100S, *words, "--price", "2.5")
    choice, spent = report["choice"], report["cost"]
    assert spent["steps"] == steps(choice["global_batch"])
    assert spent["tokens"] == spent["steps"] * choice["global_batch"] * 4096
    hours = spent["steps"] * choice["step_seconds"] / 3600
    assert spent["hours"] == pytest.approx(hours)
    assert spent["hours_range"] == pytest.approx([hours * RANGE[0], hours * RANGE[1]])
    assert spent["gpu_hours"] == pytest.approx(8 * hours)
    assert spent["money"] == pytest.approx(20 * hours)
    assert spent["money_range"] == pytest.approx([20 * hours * RANGE[0], 20 * hours * RANGE[1]])
    assert spent["energy_kwh_at_most"] == pytest.approx(8 * 0.7 * hours * RANGE[1])  # 700 W: the H100's datasheet
    assert "H100 datasheet" in spent["gpu_board_watts_source"]


def test_no_price_is_built_in() -> None:
    spent = planned(*H100S, "--tokens", "500M")["cost"]
    assert spent["money"] is None
    assert "cost" not in printed(*H100S, "--tokens", "500M").partition("Energy")[0].partition("All of it")[2]
    assert planned(*H100S)["cost"] is None


def test_what_is_said_has_two_digits_and_a_range() -> None:
    text = printed(*H100S, "--tokens", "2B", "--price", "2.5")
    spent = planned(*H100S, "--tokens", "2B", "--price", "2.5")["cost"]
    low, high = spent["hours_range"]
    assert f"about {two_digits(spent['hours'])} hours ({two_digits(low)} to {two_digits(high)})" in text
    assert "comes on top" in text or "come on top" in text
    assert "Rows are packed or as long as they may be" in text
    assert "CPUs, network and cooling are not counted" in text


@pytest.mark.parametrize(
    ("amount", "text"),
    [(8.72, "8.7"), (12.6, "13"), (1349, "1,300"), (99.6, "100"), (0.0123, "0.012"), (0.0996, "0.10"), (0, "0")],
)
def test_two_digits(amount: float, text: str) -> None:
    assert two_digits(amount) == text


@given(st.floats(1e-6, 1e15))
def test_two_digits_are_near(amount: float) -> None:
    rounded = float(two_digits(amount).replace(",", ""))
    assert abs(rounded / amount - 1) <= 0.05000001
    assert len(re.sub(r"[.,]|^[0.]+", "", two_digits(amount)).rstrip("0")) <= 2


@given(st.integers(1, 10**18))
def test_a_plain_count_is_itself(number: int) -> None:
    assert (
        workload.count_of(str(number)) == workload.count_of(f"{number:,}") == workload.count_of(f"{number:_}") == number
    )


@given(st.integers(1, 999), st.integers(0, 999), st.sampled_from("KMBTkmbt"))
def test_a_count_with_a_unit(whole: int, thousandths: int, unit: str) -> None:
    exact = Fraction(whole * 1000 + thousandths, 1000) * {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}[unit.lower()]
    assert workload.count_of(f"{whole}.{thousandths:03}{unit}") == exact


@pytest.mark.parametrize("text", ["1,5B", "1,50", "12,34,567", "1,5000", "1_0,0", "1000,000"])
def test_a_comma_that_parts_no_thousands_is_refused(text: str) -> None:
    """Half the world writes 1.5 so: ten times as many tokens would be a plan for another job."""
    with pytest.raises(UserError, match="is not a number of tokens"):
        workload.count_of(text)


@given(st.text(max_size=60))
def test_any_other_text_is_a_count_or_refused(text: str) -> None:
    count = or_refused(lambda: workload.count_of(text))
    assert "is not a number of tokens" in count if isinstance(count, str) else count > 0


KINDS = st.sampled_from([gpu.name for gpu in GPUS if " " not in gpu.name])


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(1, 16), KINDS), min_size=1, max_size=9, unique=True))
def test_a_list_of_machines_is_read_as_each_alone(asked: list[tuple[int, int, str]]) -> None:
    words = [f"{several}x{count}x{name}" for several, count, name in asked]
    parsed = machines.parse_list(" , ".join(words), "--compare")
    assert list(parsed) == words
    assert list(parsed.values()) == [machines.parse(word) for word in words]


@given(st.text(alphabet="8x,H10 -GBa", max_size=30))
def test_any_list_of_machines_is_read_or_refused(text: str) -> None:
    parsed = or_refused(lambda: machines.parse_list(text, "--compare"))
    assert "--compare" in parsed if isinstance(parsed, str) else parsed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--tokens", "2X"), "--tokens 2X is not a number of tokens"),
        (("--tokens", "0"), "is not a number of tokens"),
        (("--tokens", "1.5"), "is not a number of tokens"),
        (("--tokens", "2B", "--dataset-rows", "5"), "--tokens beside --dataset-rows"),
        (("--epochs", "3"), "the number of rows in an epoch is missing"),
        (("--dataset-rows", "0"), "--dataset-rows 0 is less than 1"),
        (("--dataset-rows", "10", "--epochs", "0"), "--epochs 0"),
        (("--tokens", "2B", "--price", "nan"), "--price nan"),
        (("--tokens", "2B", "--price", "1", "--prices", "x.toml"), "--price beside --prices"),
        (("--prices", "no-such.toml"), "cannot read no-such.toml"),
        (("--args", "no-such.json"), "--args without --config"),
        (("--disk-speed", "2"), "--disk-speed without --args"),
        (("--compare", "8xH200"), "--gpus beside --compare"),
    ],
)
def test_what_cannot_be_is_one_clear_error(words: tuple[str, ...], message: str) -> None:
    refused = accel_fsdp("plan", *H100S, *words)
    assert refused.code == 2
    assert message in refused.output
    assert "fix: " in refused.output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("H100 = 'two'", "H100 = 'two' is not a price"),
        ("H100 = -1", "H100 = -1 is not a price"),
        ("H100 = true", "is not a price"),
        ("H100 = nan", "is not a price"),
        ("H1000 = 2", "Did you mean H100?"),
        ('"8xH100" = 2', "is several GPUs"),
        ('H100 = 2\n"NVIDIA H100" = 3', "has a price already"),
        ("H100 = ", "cannot read"),
        ("[gpus]\nH100 = 2", "is not a price"),
        ('"" = 2', "can't be read"),
    ],
)
def test_a_file_of_prices_with_a_fault_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (file := tmp_path / "prices.toml").write_text(text)
    refused = accel_fsdp("plan", *H100S, "--tokens", "2B", "--prices", file)
    assert refused.code == 2
    assert message in refused.output
    assert "prices.toml" in refused.output


def test_a_price_is_found_by_name_and_size(tmp_path: Path) -> None:
    (file := tmp_path / "prices.toml").write_text('"NVIDIA A100" = 2\n"A100-40GB" = 1\n"RTX 4090" = 0.5\n')
    prices = workload.read_prices(file)
    asked = [gpus.find("A100", 80), gpus.find("A100", 40), gpus.find("4090"), gpus.find("H100")]
    assert [workload.price_for(prices, gpu) for gpu in asked] == [2, 1, 0.5, None]


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: f"{gpu.name} {gpu.memory_gib:g}")
def test_every_gpu_has_the_power_of_its_board(gpu: gpus.Gpu) -> None:
    assert 50 <= gpu.board_watts <= 1400


COMPARED = "8xH100,16xA100-40GB,8xRTX4090,2x8xH200,1xT4,8xL40S,4x8xB200,8xMI300X"
PRICES = 'H100 = 2.5\nA100 = 1.2\n"RTX 4090" = 0.4\nH200 = 3\nB200 = 5\nMI300X = 2\nT4 = 0.2\n'


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The comparison as JSON and as text."""
    folder = tmp_path_factory.mktemp("compared")
    (folder / "prices.toml").write_text(PRICES)
    words = (*LLAMA, "--compare", COMPARED, "--seq-len", "4096", "--tokens", "2B", "--prices", folder / "prices.toml")
    return planned(*words), printed(*words)


@pytest.mark.slow
def test_each_machine_has_the_choice_of_its_own_plan(compared: tuple[dict[str, Any], str]) -> None:
    report, _ = compared
    assert [machine["machine"] for machine in report["machines"]] == COMPARED.split(",")
    for machine in report["machines"][:5]:
        alone = planned(
            *LLAMA,
            "--gpus",
            machine["machine"],
            "--seq-len",
            "4096",
            "--tokens",
            "2B",
            code=0 if machine["fits"] else 1,
        )
        if not machine["fits"]:
            assert alone["choice"] is None
            continue
        choice = alone["choice"]
        assert (machine["strategy"], machine["checkpointing"]) == (choice["strategy"], choice["checkpointing"])
        assert (machine["batch_per_gpu"], machine["peak_bytes"]) == (choice["batch_per_gpu"], choice["peak_bytes"])
        assert machine["cost"]["hours"] == pytest.approx(alone["cost"]["hours"])


def test_the_cheapest_and_the_fastest_are_marked(compared: tuple[dict[str, Any], str]) -> None:
    report, text = compared
    fit = [machine for machine in report["machines"] if machine["fits"]]
    assert report["fastest"] == min(fit, key=lambda result: result["cost"]["hours"])["machine"]
    priced = [result for result in fit if result["cost"]["money"] is not None]
    assert report["cheapest"] == min(priced, key=lambda result: result["cost"]["money"])["machine"]
    assert f"Cheapest: {report['cheapest']}, " in text
    assert f"Fastest: {report['fastest']}, " in text
    assert "8xL40S: --prices FILE has no price" in text
    by_word = {"Cheapest": ("cheapest", "money", priced), "Fastest": ("fastest", "hours", fit)}
    for word, (key, amount, among) in by_word.items():
        least = min(result["cost"][amount] for result in among)
        near = [result["machine"] for result in among if result["cost"][amount] * RANGE[0] <= least]
        line = text.partition(f"{word}: ")[2].partition(" per GPU-hour.")[2]
        message = f" A prediction can't distinguish it from {', '.join(name for name in near if name != report[key])}."
        assert line.startswith(message) == (len(near) > 1)


def test_a_machine_on_which_nothing_fits_says_why(compared: tuple[dict[str, Any], str]) -> None:
    report, text = compared
    (t4,) = (machine for machine in report["machines"] if not machine["fits"])
    assert t4["machine"] == "1xT4"
    assert re.search(r"the least that a GPU needs are [\d.]+ of 14\.8 GiB", t4["why"])
    assert "1xT4: the least that a GPU needs" in text


def test_a_machine_that_can_not_load_the_model_says_what_loading_takes() -> None:
    text = printed(*LLAMA, "--compare", "8xH100", "--host-memory", "16")
    assert "loading needs 30 GiB of each machine's memory, and 16 GiB are there" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("8xH100,8xH1000",), "Did you mean H100?"),
        (("8xH100,8xH100",), "--compare has 8xH100 twice"),
        (("8xH100,",), "--compare  can't be read"),
        (("8xH100,cpu",), "a plan is about GPUs"),
        (("8xH100,8xA100", "--price", "2"), "they don't cost the same"),
        (("8xH100", "-o", "x.yaml"), "--output beside --compare"),
        (("8xH100", "--nodes", "2"), "--nodes beside --compare"),
        (("8xH100", "--batch", "0"), "--batch 0 is less than 1"),
    ],
)
def test_a_comparison_that_cannot_be_is_one_clear_error(words: tuple[str, ...], message: str) -> None:
    refused = accel_fsdp("plan", *LLAMA, "--compare", *words)
    assert refused.code == 2
    assert message in refused.output


def test_what_one_machine_lacks_stands_in_its_row() -> None:
    report = planned(*LLAMA, "--compare", "8xH100,8xV100-32GB", "--attention", "flash", "--method", "lora")
    first, second = report["machines"]
    assert first["fits"]
    assert "flash doesn't run on V100" in second["why"]


def test_nothing_fits_anywhere() -> None:
    report = planned("--model", "llama-3.1-70b", "--compare", "1xT4,1xL4", code=1)
    assert (report["cheapest"], report["fastest"]) == (None, None)


def test_from_python() -> None:
    report = package.compare("gpt2", ["8xH100", "2xA100-40GB"], tokens="1B", price=None)
    assert [machine.name for machine in report.machines] == ["8xH100", "2xA100-40GB"]
    assert report.cheapest is None
    assert report.fastest is report.machines[0]
    assert package.plan("gpt2", "2xA100", tokens="1B", price=2).spent.money is not None  # type: ignore[union-attr]
    with pytest.raises(UsageError, match="plan has no compare"):
        package.plan("gpt2", "8xH100", compare="8xH100")


# The very job


def test_the_arguments_decide_the_job(job: Any) -> None:
    report = planned(*job(), "--price", "2", "--disk-speed", "2")
    choice, spent = report["choice"], report["cost"]
    assert (choice["batch_per_gpu"], choice["accumulation"], report["sequence_length"]) == (1, 2, 2048)
    assert spent["steps"] == 1000
    assert (spent["checkpoints"], spent["checkpoints_at_once"]) == (4, 3)  # 300, 600, 900, 1000; the newest and two
    each = choice["checkpoint_bytes"]
    assert spent["checkpoints_disk_bytes"] == 3 * each
    stall = each / 2e9
    assert spent["checkpoint_stall_seconds_range"] == pytest.approx([stall / 2, stall])  # two machines write
    training = 1000 * choice["step_seconds"]
    assert spent["hours"] == pytest.approx((training + 4 * stall) / 3600)
    assert spent["hours_range"] == pytest.approx(
        [(training * RANGE[0] + 2 * stall) / 3600, (training * RANGE[1] + 4 * stall) / 3600]
    )
    assert spent["money"] == pytest.approx(2 * 16 * spent["hours"])


def test_a_stall_is_not_made_up(job: Any) -> None:
    spent = planned(*job())["cost"]
    assert spent["checkpoint_stall_seconds"] is None
    assert "is unknown without the disk's speed" in printed(*job())


def test_full_checkpoints_hold_the_weights_twice(job: Any) -> None:
    report = planned(*job(("SHARDED_STATE_DICT", "FULL_STATE_DICT")))
    weights = report["parameters"] * 4
    assert report["cost"]["checkpoint_bytes"] - report["choice"]["checkpoint_bytes"] == pytest.approx(weights, rel=0.01)


def test_epochs_need_the_rows(job: Any) -> None:
    words = job(max_steps=-1, num_train_epochs=2)
    assert planned(*words)["cost"] is None
    assert "The number of steps is unknown" in printed(*words)
    assert planned(*words, "--dataset-rows", "3201")["cost"]["steps"] == 2 * 101  # 32 rows a step


def test_evaluations_take_their_forward_pass(job: Any) -> None:
    words = job(eval_strategy="steps", eval_steps=400, eval_on_start=True)
    report = planned(*words, "--eval-rows", "160")
    spent, gpu = report["cost"], gpus.find(report["gpu"])
    assert spent["evaluations"] == 4  # before the first step, after 400, 800 and 1000
    tokens = 2 * 8 * report["sequence_length"]  # 16 ranks with Trainer's 8 rows at once
    products = 2 * report["parameters"] * tokens / (gpu.half_flops * gpu.efficiency)
    assert 1 < spent["evaluation_seconds"] / products < 1.5  # attention, norms and the loss besides
    assert planned(*words)["cost"]["evaluation_seconds"] is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--tokens", "2B"), "--tokens beside --args"),
        (("--batch", "2"), "--batch beside --args"),
        (("--method", "lora"), "--method beside --args"),
        (("--dataset-rows", "9", "--epochs", "2"), "num_train_epochs of --args says it"),
    ],
)
def test_a_flag_that_the_arguments_decide_is_refused(words: tuple[str, ...], message: str, job: Any) -> None:
    refused = accel_fsdp("plan", *job(), *words)
    assert (refused.code, message in refused.output) == (2, True)


def test_arguments_of_another_model_are_refused(job: Any) -> None:
    refused = accel_fsdp("plan", *job(model_name_or_path="openai-community/gpt2"))
    assert refused.code == 2
    assert "one of them is another job's" in refused.output


def test_arguments_that_would_fail_are_no_plan(job: Any) -> None:
    """What the linter finds in the arguments themselves, not in those that a plan would write."""
    report = planned(*job(fsdp="full_shard"), code=1)
    assert "AF" in report["strategies"][0]["refused"]


def test_a_job_file_and_a_plan_have_the_same_steps_and_seconds(job: Any) -> None:
    from accel_fsdp.config import read_config
    from accel_fsdp.launch.script import duration

    words = job()
    config, _ = read_config(Path(str(words[5])))
    known = duration.predicted(ARGUMENTS, config, 2, machines.parse("8xH100-80GB")[0])
    spent = planned(*words)["cost"]
    assert known is not None
    assert known.steps == spent["steps"]
    assert known.steps * known.step.step_seconds / 3600 == pytest.approx(spent["hours"])


RECIPES = st.builds(
    Recipe,
    method=st.sampled_from(["full", "lora", "qlora"]),
    precision=st.just("bf16"),
    rows=st.integers(1, 64),
    length=st.integers(1, 9000),
    accumulation=st.integers(1, 64),
    optimizer=st.sampled_from(["adamw_torch_fused", "adamw_torch", "adamw_8bit", "adafactor", "sgd"]),
    checkpointing=st.sampled_from(["none", "reentrant", "full"]),
    lora_rank=st.integers(1, 256),
    attention=st.sampled_from(["sdpa", "eager", "flash"]),
    kernels=st.sampled_from(["none", "liger"]),
)


@given(RECIPES)
def test_what_a_plan_proposes_is_read_back(recipe: Recipe) -> None:
    """The arguments that the plan writes for a recipe say that recipe, where the YAML doesn't say a part of it."""
    again = from_arguments.recipe_of(proposal.arguments(Job(Layout.ddp(8, 8), recipe)))
    for name in ("method", "rows", "length", "accumulation", "optimizer", "checkpointing", "attention", "kernels"):
        assert getattr(again, name) == getattr(recipe, name), name
    assert recipe.method == "full" or again.lora_rank == recipe.lora_rank


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


def flow(arguments: Mapping[str, Any], steps: int, per_epoch: int) -> Iterator[tuple[bool, bool]]:
    """After each step of a run whether Trainer's own callback saves and evaluates."""
    from transformers import TrainingArguments
    from transformers.trainer_callback import DefaultFlowCallback, TrainerControl, TrainerState

    asked = TrainingArguments(output_dir="never-written", use_cpu=True, max_steps=steps, **arguments)
    state = TrainerState(max_steps=steps)
    state.compute_steps(asked, steps)
    for step in range(1, steps + 1):
        state.global_step, state.epoch = step, step / per_epoch
        control = DefaultFlowCallback().on_step_end(asked, state, TrainerControl())
        if step % per_epoch == 0 or step == steps:
            control = DefaultFlowCallback().on_epoch_end(asked, state, control)
        yield control.should_save, control.should_evaluate


@pytest.mark.parametrize("strategy", ["steps", "epoch", "no"])
@pytest.mark.parametrize(("steps", "every", "per_epoch"), [(100, 7, 30), (90, 30, 30), (5, 10, 5), (40, 0.3, 25)])
def test_saves_and_evaluations_are_trainers(strategy: str, steps: int, every: float, per_epoch: int) -> None:
    asked = {"save_strategy": strategy, "eval_strategy": strategy, "save_steps": every, "eval_steps": every}
    schedule = from_arguments.schedule_of({**asked, "max_steps": steps})
    seen = list(flow(asked, steps, per_epoch))
    assert cost.events(schedule.saves, schedule.save_steps, steps, per_epoch) == sum(saves for saves, _ in seen)
    assert cost.evaluations_in(schedule, steps, per_epoch) == sum(evaluates for _, evaluates in seen)


@pytest.mark.parametrize("rows", [1, 7, 64, 1000, 1001])
@pytest.mark.parametrize(("batch", "accumulation", "ranks"), [(1, 1, 1), (2, 4, 8), (3, 2, 4)])
def test_steps_of_an_epoch_are_accelerates(rows: int, batch: int, accumulation: int, ranks: int) -> None:
    from accelerate.data_loader import prepare_data_loader
    from torch.utils.data import DataLoader

    loader = prepare_data_loader(
        DataLoader(list(range(rows)), batch_size=batch),  # type: ignore[arg-type]
        num_processes=ranks,
        process_index=0,
        put_on_device=False,
    )
    job = Job(Layout.ddp(ranks, ranks), Recipe(rows=batch, accumulation=accumulation))
    assert cost.steps_per_epoch(rows, job) == max(math.ceil(len(loader) / accumulation), 1)


# Speed


@settings(max_examples=60)
@given(st.integers(0, 400), st.integers(1, 300), st.integers(1, 300), st.integers(1, 10_000), st.integers(0, 10_000))
def test_the_largest_that_fits_is_found_with_few_tries(
    limit: int, knee: int, most: int, slope: int, constant: int
) -> None:
    """Whatever memory does, as long as it grows: flat, then steep; against trying each number."""

    class Device:
        def __init__(self, number: int) -> None:
            self.needed = constant + max(0, number - knee) * slope
            self.fits = number <= limit

    tried: list[int] = []

    def needs(number: int) -> Device:
        tried.append(number)
        return Device(number)

    has = round((constant + max(0, limit - knee) * slope) * 1.05)
    assert search._largest_number(needs, has, most) == min(limit, most)  # type: ignore[arg-type]
    assert len(tried) == len(set(tried)) <= 3 * most.bit_length() + 2


@pytest.mark.slow
def test_a_comparison_of_eight_machines_takes_no_longer_than_three_imports_of_torch() -> None:
    """As a ratio, since machines differ; `benchmarks/startup.py` keeps the seconds."""
    torch = [sys.executable, "-c", "import torch"]
    words = [sys.executable, "-m", "accel_fsdp", "plan", *LLAMA, "--compare", COMPARED, "--seq-len", "4096"]

    def seconds(command: list[str]) -> float:
        times = []
        for _ in range(3):
            start = time.perf_counter()
            subprocess.run(command, capture_output=True, check=True, timeout=60)
            times.append(time.perf_counter() - start)
        return min(times)

    assert seconds(words) < 3 * seconds(torch)


def test_a_comparison_needs_no_torch() -> None:
    code = (
        f"import sys; sys.argv = {['accel-fsdp', 'plan', *LLAMA, '--compare', '8xH100,1xT4']!r}\n"
        "from accel_fsdp.cli import main\n"
        "try:\n    main()\n"
        "except SystemExit:\n    pass\n"
        "print([name for name in ('torch', 'transformers', 'accelerate', 'numpy') if name in sys.modules])"
    )
    assert run([sys.executable, "-c", code]).output.endswith("[]\n")
