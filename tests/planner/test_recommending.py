"""What `accel-fsdp plan` recommends: it works, it fits, its YAML can be written, it is no larger than need be."""

import contextlib
import html
import io
import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, SFT, accel_fsdp

from accel_fsdp import cli, linter, planner
from accel_fsdp.config import Engine, Method
from accel_fsdp.hardware import gpus
from accel_fsdp.job import Layout, Recipe
from accel_fsdp.linter.rules import Subject, run
from accel_fsdp.models import catalogue
from accel_fsdp.planner import proposal, text_report
from accel_fsdp.prediction import speed, trace_store
from accel_fsdp.units import GIB
from accel_fsdp.wizard import to_yaml

Job = Callable[[str], tuple[str | Path, ...]]
MIXTRAL = "mistralai/Mixtral-8x7B-Instruct-v0.1"


def here(*words: str | Path) -> str:
    """What a command prints, in this process."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        cli.call([str(word) for word in words])
    return printed.getvalue()


def planned(*flags: str | Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(here("plan", *flags, "--json"))
    return content


def shown(*flags: str | Path) -> str:
    return " ".join(here("plan", *flags, "--details").split())


def plan_report(model: str, machine: str, method: Method = "full") -> text_report.PlanReport:
    return planner.make_plan(planner.PlanCommand(model, machine, method=method))


def launch_words(path: Path) -> list[str]:
    """The launch command in the header of a YAML."""
    lines = path.read_text().splitlines()
    return shlex.split(lines[lines.index("# Launch:") + 1].removeprefix("#"))


@pytest.mark.parametrize(
    "flags",
    [
        ("--model", "llama-3.1-8b", "--gpus", "8xH100-80GB"),
        ("--model", "llama-3.1-8b", "--gpus", "2x4090", "--method", "lora"),
        ("--model", MIXTRAL, "--gpus", "4x8xH100"),
        ("--model", "llama-3.1-8b", "--gpus", "8xT4"),
        ("--model", "llama-3.1-8b", "--gpus", "8xH100", "--optimizer", "adafactor", "--global-batch", "64"),
        ("--model", "llama-3.1-8b", "--gpus", "8xH100", "--seq-len", "16384"),
        ("--model", "gpt2", "--gpus", "8xH100", "--seq-len", "1024"),  # the wizard's own length of it
    ],
)
def test_what_is_recommended_can_be_written_and_fits_as_it_was_said(flags: tuple[str, ...], tmp_path: Path) -> None:
    """The command writes the YAML of -o, the linter finds nothing in it, and its own plan has the same peak."""
    own = tmp_path / "own.yaml"
    content = planned(*flags, "-o", own)
    choice, path = content["choice"], tmp_path / "fsdp.yaml"
    words = shlex.split(content["config_command"])
    assert words[:5] == ["accel-fsdp", "config", "--yes", "-o", "fsdp.yaml"]
    assert ("--seq-len" in words) == ("16384" in flags)
    here("config", "--yes", "-o", path, *words[5:])
    launched = launch_words(own)
    short, whole = (file.read_text().splitlines() for file in (path, own))
    at = short.index("# Launch:") + 1
    assert short[:at] + short[at + 1 :] == whole[:at] + whole[at + 1 :]
    by_wizard = launch_words(path)
    assert by_wizard[by_wizard.index("--max_length") + 1] == str(content["sequence_length"])
    by_header = planned("--config", path)
    assert by_header["sequence_length"] == content["sequence_length"]
    line = tmp_path / "arguments"
    line.write_text(shlex.join(launched))
    checked = accel_fsdp("check", path, "--args", line, "--model", content["model"], "--strict")
    assert checked.code == 0, checked.output
    script = content["script_arguments"]
    assert {name: launched[launched.index(f"--{name}") + 1] for name in script} == {
        name: to_yaml.flag_text(value) for name, value in script.items()
    }
    batch = ("--batch", str(choice["batch_per_gpu"]), "--accumulation", str(choice["accumulation"]))
    checkpointing = ("--checkpointing", "full") if "gradient_checkpointing" in script else ()
    rest = [flag for flag in flags if flag not in ("--global-batch", "64")]
    judged = planned(*rest, *batch, *checkpointing, "--config", path)["strategies"][0]
    assert choice["fits"] == "yes"
    assert (judged["fits"], judged["peak_bytes"]) == (choice["fits"], choice["peak_bytes"])


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_of_one_gpu_a_yaml_without_an_engine_is_written(method: str, tmp_path: Path) -> None:
    """The linter finds nothing in it, it can be predicted, and it starts."""
    path = tmp_path / "own.yaml"
    asked = ("--model", "gpt2", "--gpus", "1xH100", "--method", method)
    chosen = planned(*asked, "-o", path)["choice"]
    checkpointing = ("--checkpointing", chosen["checkpointing"])
    batch = ("--batch", str(chosen["batch_per_gpu"]))
    judged = planned(*asked, "--config", path, *batch, *checkpointing)["strategies"][0]
    assert (judged["strategy"], judged["peak_bytes"]) == ("one GPU", chosen["peak_bytes"])
    assert "distributed_type: 'NO'\nmixed_precision: bf16\nnum_processes: 1\n" in path.read_text()
    assert (
        "--dataset_name train/data/fsdp_chat --output_dir runs/first --per_device_train_batch_size" in path.read_text()
    )
    assert cli.call(["check", "--strict", "--model", "gpt2", str(path)]) == 0
    assert "ACCELERATE_MIXED_PRECISION=bf16" in here("launch", "--dry-run", path, SFT)


def test_where_nothing_fits_no_yaml_is_written_and_the_exit_code_says_so(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    done = accel_fsdp("plan", "--model", "llama-3.1-70b", "--gpus", "1xRTX4090", "-o", path)
    assert (done.code, path.exists()) == (1, False)
    assert f"warning: {path} was NOT written: nothing fits" in done.output


MACHINES = ("1xA100", "2xRTX4090", "8xA100-40GB", "8xH100", "4x8xH100")


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("place", "method"), [(0, "full"), (1, "lora"), (2, "qlora")])
def test_whatever_is_recommended_passes_the_linter_and_fits(place: int, method: Method) -> None:
    """A third of the catalogue with each method: wizard, linter and memory agree with the choice and its equals."""
    rules = {rule.code: rule for rule in linter.all_rules()}
    entries = catalogue.entries()
    planned = [name for name in entries if method in entries[name].get("methods", [method])]
    distinct = [name for name in planned if trace_store.first_alike(name) == name]
    for number, name in enumerate(distinct[place::3]):
        report = plan_report(name, MACHINES[(number + place) % len(MACHINES)], method)
        ways = [report.plan.choice, *report.plan.ties, report.plan.runner_up]
        for candidate in (way for way in ways if way is not None):
            assert candidate.fits, name
            assert report.problem.is_hosted(candidate.job), name
            if candidate.layout.engine is Engine.NONE:
                continue
            assert report.proposer is not None
            values = to_yaml.to_mapping(report.proposer.answers(candidate.job))
            faults = run(Subject(values, args=proposal.arguments(candidate.job)), rules)
            assert [fault for fault in faults if fault.severity != "note"] == [], name


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("flags", "choice"),
    [
        (
            ("--model", "deepseek-v3", "--gpus", "16x8xH100", "--method", "lora"),
            "FSDP2 HYBRID_SHARD offload",
        ),
        (("--model", "deepseek-v3", "--gpus", "64x8xH100"), None),
        (("--model", "llama-3.1-8b", "--gpus", "8xH100", "--host-memory", "100"), "FSDP2 FULL_SHARD"),
        (("--model", "llama-3.1-8b", "--gpus", "8xH100", "--host-memory", "20"), None),
    ],
)
def test_what_is_recommended_can_be_loaded(flags: tuple[str, ...], choice: str | None) -> None:
    """Each rank of ZeRO and DDP reads the whole model, and one of FSDP's; without enough memory nothing fits."""
    content = planned(*flags)
    taken = [content["choice"], *content["ties"], content["runner_up"]] if choice else []
    assert (content["choice"] and content["choice"]["strategy"]) == choice
    assert all(row["host_loading_bytes"] <= content["host_memory_bytes"] for row in taken if row)
    if flags[-1] in ("100", "20"):
        zero = next(row for row in content["strategies"] if row["strategy"] == "ZeRO-3")
        loading = f"239 GiB of memory on each machine, where {flags[-1]} GiB are"
        assert (zero["fits"], zero["refused"]) == ("fails", f"Loading takes {loading}")
    if flags[-1] == "20":
        assert content["changes"][-1].startswith("machines with 30 GiB of memory")


@pytest.mark.parametrize(
    ("name", "edits", "flags", "needs", "changes"),
    [
        *[
            (name, {}, ("--method", "lora", "--host-memory", "100"), "Loading takes 120 GiB", migrated)
            for name, migrated in [
                ("ddp", ["accel-fsdp migrate ", "machines with 120 GiB"]),
                ("zero3", ["accel-fsdp migrate ", "machines with 120 GiB"]),
            ]
        ],
        (
            "fsdp2",
            {"efficient_loading: true": "efficient_loading: false"},
            ("--host-memory", "100"),
            "Loading takes 239 GiB",
            ["fsdp_cpu_ram_efficient_loading: true", "machines with 239 GiB"],
        ),
        (
            "fsdp2_offload",
            {},
            ("--host-memory", "100"),
            "CPU offload takes 120 GiB",
            ["--use_peft true", "machines with"],
        ),
    ],
)
def test_a_yaml_whose_job_a_machine_cannot_load_does_not_fit(
    name: str, edits: dict[str, str], flags: tuple[str, ...], needs: str, changes: list[str], tmp_path: Path
) -> None:
    text = (ROOT / "accelerate_configs" / f"{name}.yaml").read_text()
    for old, new in edits.items():
        assert old in text
        text = text.replace(old, new)
    path, page = tmp_path / "job.yaml", tmp_path / "plan.html"
    path.write_text(text)
    job = ("--config", path, "--model", "llama-3.1-8b", "--gpus", "8xH100", *flags)
    content = planned(*job)
    (row,) = content["strategies"]
    lack = f"{needs} of memory on each machine, where 100 GiB are"
    assert (content["choice"], row["fits"], row["refused"]) == (None, "fails", lack)
    assert [sum(change.startswith(start) for change in content["changes"]) for start in changes] == [1, 1]
    finished = accel_fsdp("plan", *job, "--html", page)
    assert finished.code == 1
    assert f"It doesn't fit: {lack}. What would fit:" in " ".join(finished.output.split())
    shown = html.unescape(page.read_text())
    assert f"<strong>It doesn't fit: {lack}." in shown
    assert "What would fit: " in shown


def test_a_method_that_fits_is_told_with_what_loading_takes() -> None:
    """Each rank of DDP reads the weights, and machines have too little memory for it."""
    words = ("--model", "llama-3.1-8b", "--gpus", "8xH100", "--host-memory", "20")
    content = planned(*words)
    assert content["choice"] is None
    assert content["changes"][-1].startswith("machines with 30 GiB of memory")


@pytest.mark.parametrize("optimizer", ["adafactor", "adamw_8bit"])
def test_an_optimizer_that_crashes_under_fsdp2_never_comes_with_it(optimizer: str) -> None:
    content = planned("--model", "llama-3.1-8b", "--gpus", "8xH100", "--optimizer", optimizer)
    rows = {row["strategy"]: row for row in content["strategies"]}
    assert rows["FSDP2 FULL_SHARD"]["fits"] == "fails"
    assert rows["FSDP2 FULL_SHARD"]["refused"]
    assert content["choice"] is None or not content["choice"]["strategy"].startswith("FSDP2")


def test_checkpointing_of_an_adapter_is_the_script_s() -> None:
    text = shown("--model", "llama-3.1-8b", "--gpus", "2x4090", "--method", "lora")
    assert "2 sequences per GPU, activation checkpointing" in text
    assert "--gradient_checkpointing true" in text
    assert "--activation-checkpointing" not in text


def test_experts_that_fsdp2_pads_are_sharded_by_an_engine_that_cuts_through_them() -> None:
    content = planned("--model", MIXTRAL, "--gpus", "4x8xH100")
    choice = content["choice"]
    assert choice["strategy"] == "FSDP1 FULL_SHARD"
    by_offload = 3_600  # tokens/s of FSDP2 with offload, the fastest of DDP and FSDP2
    assert choice["tokens_per_s_per_gpu"] > by_offload


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("attention", ["sdpa", "flash", "eager"])
def test_a_model_with_eager_attention_alone_is_the_same_whatever_is_asked(attention: str) -> None:
    content = planned("--model", "gpt-oss-20b", "--gpus", "8xH100", "--attention", attention, "--seq-len", "4096")
    eager = planned("--model", "gpt-oss-20b", "--gpus", "8xH100", "--seq-len", "4096")
    assert content["strategies"] == eager["strategies"]
    if attention == "flash":
        text = shown("--model", "gpt-oss-20b", "--gpus", "8xH100", "--attention", attention)
        assert "runs eager attention; so does this plan" in text
        assert "MXFP4" in text


@pytest.mark.slow
def test_weights_that_are_published_in_fp8_are_named() -> None:
    text = shown("--model", "DeepSeek-R1", "--gpus", "8xH100", "--method", "lora")
    assert "published in FP8" in text


def test_attention_without_a_kernel_computes_all_keys() -> None:
    """gpt-oss has no sdpa: it computes the half of the products that a kernel which knows the mask leaves out."""
    stored = trace_store.find("gpt-oss-20b")
    assert stored is not None
    recipe, layout, gpu = Recipe(length=8192), Layout(Engine.FSDP2, 1, 8, 8), gpus.find("H100")
    eager = speed.step_time(stored[0], replace(recipe, attention="eager"), layout, gpu)
    assert speed.step_time(stored[0], recipe, layout, gpu) == eager
    kernel = speed.step_time(replace(stored[0], eager_only=False), recipe, layout, gpu)
    assert eager.step_seconds > kernel.step_seconds


@pytest.mark.slow
def test_qlora_is_proposed_where_it_fits_and_offload_is_not_led_with() -> None:
    alone = planned("--model", "llama-3.1-70b", "--gpus", "1xA100-80GB")
    assert alone["choice"] is None
    assert alone["changes"][0].startswith("--method qlora")
    largest = planned("--model", "meta-llama/Llama-3.1-405B", "--gpus", "8xH100")
    assert largest["choice"] is None  # offload would take 6,048 GiB of a machine's memory
    assert largest["changes"][0].startswith("--method ")
    none = planned("--model", "meta-llama/Llama-3.1-405B", "--gpus", "2xT4")  # a gathered layer is larger
    assert none["changes"] == []
    told_more = planned("--model", "meta-llama/Llama-3.1-405B", "--gpus", "8xH100", "--host-memory", "8000")
    assert told_more["choice"]["strategy"] == "FSDP2 FULL_SHARD offload"


def test_each_way_that_fails_has_its_own_reason() -> None:
    output = shown("--model", "llama-3.1-8b", "--gpus", "8xH100", "--method", "qlora")
    assert "fails, unless the script is train/sft.py: FSDP1. " in output
    assert "FSDP1. PEFT loses the adapter under FSDP1: the exported adapter has no tensors. " in output
    assert "fails: DeepSpeed. ZeRO-3 can't partition 4-bit weights, and with ZeRO-1 and" in output


def test_where_another_optimizer_fits_it_is_proposed() -> None:
    crashing = ("--method", "qlora", "--optimizer", "adamw_8bit")
    content = planned("--model", "openai/gpt-oss-20b", "--gpus", "2x4090", *crashing)
    assert content["choice"] is None
    assert content["changes"][0].startswith("--optimizer adamw_torch_fused")


def test_the_least_method_that_is_proposed_fits() -> None:
    fits = planned("--model", "llama-3.1-70b", "--gpus", "1xA100-80GB", "--method", "qlora")
    assert fits["choice"]["fits"] == "yes"
    assert fits["choice"]["checkpointing"] == "full"


@pytest.mark.parametrize("total", [8, 64, 96, 1024])
def test_a_global_batch_is_met_exactly(total: int) -> None:
    content = planned("--model", "llama-3.1-8b", "--gpus", "8xH100", "--global-batch", str(total))
    for tie in (content["choice"], *content["ties"]):
        assert tie["batch_per_gpu"] * tie["accumulation"] * 8 == tie["global_batch"] == total


def test_a_micro_batch_is_no_larger_than_pays() -> None:
    """One step with 256 sequences on each of 8 GPUs is no advice: a smaller batch is as fast."""
    content = planned("--model", "gpt2", "--gpus", "8xH100")
    choice = content["choice"]
    assert choice["batch_per_gpu"] <= 16
    most = planned("--model", "gpt2", "--gpus", "8xH100", "--batch", "64")
    same = next(row for row in most["strategies"] if row["strategy"] == choice["strategy"])
    assert choice["tokens_per_s_per_gpu"] >= 0.9 * same["tokens_per_s_per_gpu"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--global-batch", "100"), "--global-batch 96, or 104"),
        (("--global-batch", "64", "--accumulation", "4"), "leave out one of them"),
        (("--global-batch", "0"), "--global-batch 0 is less than 1"),
        (("--host-memory", "-1"), "--host-memory -1 is less than 1"),
        (("--host-memory", "-3"), "a machine has some memory to load the model"),
        (("--config", str(ROOT / "accelerate_configs" / "fsdp2.yaml"), "-o", "x.yaml"), "recommends no other one"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(flags: tuple[str, ...], message: str) -> None:
    refused = accel_fsdp("plan", "--model", "llama-3.1-8b", "--gpus", "8xH100", *flags)
    assert refused.code == 2
    assert message in " ".join(refused.output.split())


@pytest.mark.parametrize("name", ["8xT4", "8xV100-32GB"])
def test_flash_attention_is_refused_on_a_gpu_that_does_not_run_it(name: str) -> None:
    refused = accel_fsdp("plan", "--model", "gpt2", "--gpus", name, "--attention", "flash")
    assert refused.code == 2
    assert "flash_attention_2 needs compute capability 8.0" in " ".join(refused.output.split())
    older = {gpu.name for gpu in gpus.GPUS if not gpu.has_bf16}
    assert older == {"T4", "V100"}


def test_the_layer_class_of_another_model_is_no_fit(tmp_path: Path) -> None:
    path = tmp_path / "fsdp.yaml"
    path.write_text((ROOT / "accelerate_configs" / "fsdp2.yaml").read_text().replace("LlamaDecoderLayer", "GPT2Block"))
    refused = accel_fsdp("plan", "--model", "llama-3.1-8b", "--gpus", "8xH100", "--config", path)
    assert refused.code == 1
    text = " ".join(refused.output.split())
    assert "has no GPT2Block" in text
    assert "Accelerate stops" in text
    assert "It fits" not in text


def test_the_json_says_which_it_is_and_what_a_gpu_has() -> None:
    content = planned("--model", "gpt2", "--gpus", "8xH100")
    assert content["schema_version"] == text_report.SCHEMA_VERSION
    assert content["gpu_memory_sold_gib"] == 80
    assert content["gpu_memory_usable_bytes"] == round(gpus.find("H100").usable_gib * GIB)


@pytest.mark.parametrize(
    ("word", "flags"),
    [
        ("tight: less, so that it may run out", ("--gpus", "8xA100-40GB", "--checkpointing", "full", "--batch", "7")),
        ("with 2.0 GiB for CUDA and NCCL", ("--gpus", "8xH100")),
        ("tokens/s per GPU", ("--gpus", "8xH100")),
    ],
)
def test_the_table_explains_itself(word: str, flags: tuple[str, ...]) -> None:
    text = here("plan", "--model", "llama-3.1-8b", *flags, "--details")
    if "tight" in word:
        assert any(" tight " in line for line in text.splitlines())
    assert word in " ".join(text.split())
    assert " row" not in text


def test_the_launch_line_sets_expandable_segments(tmp_path: Path) -> None:
    flags = ("--model", "llama-3.1-8b", "--gpus", "8xA100-40GB")
    here("plan", *flags, "-o", tmp_path / "fsdp.yaml")
    variable, *launched = launch_words(tmp_path / "fsdp.yaml")
    assert variable == "PYTORCH_ALLOC_CONF=expandable_segments:True"
    assert launched[:2] == ["accelerate", "launch"]


def test_the_verdict_is_that_of_what_is_needed_and_the_margin() -> None:
    """With longer and longer rows a job fits, then does so without the margin, then not."""
    job = ("--model", "llama-3.1-8b", "--method", "lora", "--checkpointing", "full", "--batch", "8")
    seen = []
    for length in range(1024, 8192, 64):
        content = planned(*job, "--seq-len", str(length), "--gpus", "1xA100-80GB")
        row, has = content["strategies"][0], content["gpu_memory_usable_bytes"]
        expected = "yes" if row["needed_bytes"] * 1.05 <= has else "tight" if row["needed_bytes"] <= has else "no"
        assert row["fits"] == expected
        assert (content["choice"] is not None) == (expected == "yes")
        assert bool(row["runs_out"]) == (expected != "yes")
        seen.append(expected)
    assert list(dict.fromkeys(seen)) == ["yes", "tight", "no"]


def test_gpus_without_expandable_segments_keep_room_for_fragmentation(tmp_path: Path) -> None:
    """A fifth of what is allocated; the launch line has no variable."""
    flags = ("--model", "llama-3.1-8b", "--gpus", "8xMI250X", "--seq-len", "4096")
    content = planned(*flags)
    for row in (*content["strategies"], content["choice"]):
        room = content["gpu_memory_usable_bytes"] - row["needed_bytes"] + row["peak_bytes"]
        assert (row["fits"] == "yes") == (row["peak_bytes"] * 1.2 <= room) or row["fits"] == "fails"
    here("plan", *flags, "-o", tmp_path / "fsdp.yaml")
    assert "PYTORCH_ALLOC_CONF" not in (tmp_path / "fsdp.yaml").read_text()
    assert "20% for gaps, as expandable segments may hang under ROCm" in shown(*flags)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """The flags of a plan for a LoRA job with these arguments more."""
    yaml, line = tmp_path / "fsdp.yaml", tmp_path / "arguments"
    machine = ("--model", "llama-3.1-8b", "--gpus", "4xA100-80GB")
    here("config", "--yes", "-o", yaml, *machine, "--method", "lora")

    def flags(more: str) -> tuple[str | Path, ...]:
        line.write_text(f"accelerate launch train/sft.py --use_peft true --lora_dropout 0 --max_length 4096 {more}\n")
        return (*machine, "--config", yaml, "--args", line)

    return flags


def test_packed_rows_take_a_mask_unless_attention_is_flash(job: Job) -> None:
    """Sdpa keeps it as floats for backward, once per layer."""
    rows = "--per_device_train_batch_size 2"
    peaks = [
        planned(*job(f"{rows} {more}"))["strategies"][0]["peak_bytes"]
        for more in ("--packing true", "--packing true --attn_implementation flash_attention_2", "--packing false")
    ]
    assert peaks[0] - peaks[1] >= 32 * 2 * 4096 * 4096 * 2
    assert peaks[1] == peaks[2]


def test_an_evaluation_that_does_not_fit_is_told_its_batch(job: Job) -> None:
    steps = "--per_device_train_batch_size 1 --gradient_checkpointing true --packing true --eval_strategy steps"
    refused = accel_fsdp("plan", *job(f"{steps} --per_device_eval_batch_size 64"), "--json")
    assert refused.code == 1
    change = json.loads(refused.output)["changes"][0]
    assert change.startswith("--per_device_eval_batch_size ")
    assert planned(*job(f"{steps} {change}"))["strategies"][0]["fits"] != "no"


def test_an_evaluation_of_more_rows_than_a_step_has(job: Job) -> None:
    """Its forward saves nothing, but has all logits. Trainer evaluates 8 rows unless it is told otherwise."""
    steps = "--per_device_train_batch_size 1 --gradient_checkpointing true --max_steps 10"
    trained, evaluated, small = (
        planned(*job(f"{steps} {more}"))["strategies"][0]
        for more in ("", "--eval_strategy steps", "--eval_strategy steps --per_device_eval_batch_size 1")
    )
    logits = 8 * 4096 * 128256
    assert evaluated["peak_phase"] == "evaluation"
    assert evaluated["peak_bytes"] - evaluated["steady_bytes"] > 8 * logits
    assert small["peak_bytes"] == trained["peak_bytes"] > small["phases"]["evaluation"] > small["steady_bytes"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--per_device_train_batch_size -2", "per_device_train_batch_size: -2 in the arguments"),
        ("--max_steps abc", "max_steps: abc in the arguments"),
        ("--per_device_train_batch_sise 2", "Did you mean per_device_train_batch_size?"),
    ],
)
def test_arguments_that_cannot_be_read_are_refused(more: str, message: str, job: Job) -> None:
    refused = accel_fsdp("plan", *job(more))
    assert refused.code == 2
    assert message in " ".join(refused.output.split())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--gpus", "1xH100", "--price", "2.5"), "--price without --tokens"),
        (("--gpus", "1xH100", "--price", "2,5"), "--price takes a number, not 2,5"),
        (("--gpus", "99999999999xH100"), "is 99,999,999,999 GPUs"),
    ],
)
def test_slips_are_refused(
    flags: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refused = accel_fsdp("plan", "--model", "gpt2", *flags)
    assert refused.code == 2
    assert message in " ".join(refused.output.split())
    assert not list(tmp_path.iterdir())
