"""`accel-fsdp plan`: what it prints, that it is quick without torch, and that its numbers are those of known tables."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROOT, here, planned, run

from accel_fsdp.command_line import parse_command_line
from accel_fsdp.config import Engine, script_arguments
from accel_fsdp.hardware import gpus
from accel_fsdp.hardware.machines import parse
from accel_fsdp.job import Job, Layout, Recipe, from_arguments
from accel_fsdp.prediction import RANGE, Problem, search, trace_store
from accel_fsdp.prediction.memory import (
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    Block,
    Meter,
    ModelShape,
    Parameter,
    step,
)

LLAMA = "meta-llama/Llama-3.1-8B"
CONFIGS = ROOT / "accelerate_configs"


def test_the_table_of_a_known_model() -> None:
    shown = here("plan", "--model", "llama-3.1-8b", "--gpus", "8xH100-80GB", "--seq-len", "4096", "--details")
    assert shown.code == 0
    for name in ("DDP", "FSDP2 FULL_SHARD", "FSDP2 SHARD_GRAD_OP", "FSDP1 FULL_SHARD", "ZeRO-3", "Take FSDP2"):
        assert name in shown.output
    assert "Equally fast within the error of a prediction" in shown.text


def run_light(*words: str | Path) -> tuple[str, list[str]]:
    """What a command prints in a process of its own, and which heavy libraries it imports."""
    code = (
        f"import sys; sys.argv = {['accel-fsdp', *map(str, words)]!r}\n"
        "from accel_fsdp.cli import main\n"
        "try:\n    main()\n"
        "except SystemExit:\n    pass\n"
        "print('IMPORTED', *({'torch', 'transformers', 'accelerate', 'numpy'} & set(sys.modules)))"
    )
    printed, _, imported = run([sys.executable, "-c", code]).output.partition("IMPORTED")
    return printed, imported.split()


@pytest.mark.parametrize(("flag", "machines"), [("--gpus", "2xA100"), ("--compare", "2xA100,8xH100")])
def test_no_heavy_library_is_imported(flag: str, machines: str) -> None:
    printed, imported = run_light("plan", "--model", "gpt2", flag, machines)
    assert ("tokens/s" in printed, imported) == (True, []), printed


@pytest.mark.slow
def test_an_unseen_config_is_traced_once(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("plan", "--model", tiny_model, "--gpus", "2xA100", "--seq-len", "64")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = here(*words)
    assert first.code == 0, first.output
    assert list((tmp_path / "accel-fsdp").iterdir())
    second, imported = run_light(*words)
    assert "torch" not in imported
    assert second in first.output  # the first import of bitsandbytes may add a line


JOB = ("--model llama-3.1-8b --gpus 8xH100 ", "--model gpt2 ")
REFUSED = [
    ("--model gpt2 --gpus 8xH1000", "Did you mean H100?"),
    ("--model gpt2 --gpus 0xH100", "can't be read"),
    ("--model gpt2 --gpus 8xH100-0GB", "8xH100-0GB can't be read"),
    ("--model gpt2 --gpus 1xA100-800GB", "Did you mean 80GB?"),
    ("--model gpt2 --gpus 100xH100", "--gpus 13x8xH100"),
    ("--model gpt2 --gpus 99999999999xH100", "is 99,999,999,999 GPUs"),
    ("--model gpt2 --gpus 8xAscend910B", "an NPU"),
    ("--model gpt2 --gpus cpu", "a plan is about GPUs"),
    ("--model gpt2 --gpus 2x8xH100 --nodes 3", "names 2 machines"),
    ("--model gpt2 --gpus 8xT4 --attention flash", "flash_attention_2 needs compute capability 8.0"),
    ("--model ./no/such --gpus 8xH100", "does not exist"),
    ("--model meta-llama/Llama-3.1-8 --gpus 8xH100", "Did you mean meta-llama/Llama-3.1-8B?"),
    *((f"{JOB[0]}--{flag} 0", f"--{flag} 0 is less than 1") for flag in ("batch", "accumulation", "nodes")),
    (JOB[0] + "--global-batch 0", "--global-batch 0 is less than 1"),
    (JOB[0] + "--lora-rank -8", "--lora-rank -8 is less than 1"),
    (JOB[0] + "--host-memory -3", "a machine has some memory to load the model"),
    (JOB[0] + "--global-batch 100", "--global-batch 96, or 104"),
    (JOB[0] + "--global-batch 64 --accumulation 4", "leave out one of them"),
    (JOB[0] + f"--config {CONFIGS}/fsdp2.yaml -o x.yaml", "recommends no other one"),
    (JOB[0] + "--args no-such.json", "--args without --config"),
    (JOB[0] + "--tokens 2X", "--tokens 2X is not a number of tokens"),
    (JOB[0] + "--tokens 0", "is not a number of tokens"),
    (JOB[0] + "--tokens 2B --price nan", "--price nan"),
    (JOB[0] + "--price 1", "--price without --tokens"),
    (JOB[0] + "--price 2,5", "--price: 2,5 is not a number"),
    (JOB[0] + "--compare 8xH200", "--gpus beside --compare"),
    (JOB[1] + "--compare 8xH100,8xH1000", "Did you mean H100?"),
    (JOB[1] + "--compare 8xH100,8xH100", "--compare has 8xH100 twice"),
    (JOB[1] + "--compare 8xH100,", "--compare can't be read"),
    (JOB[1] + "--compare 8xH100,cpu", "a plan is about GPUs"),
    (JOB[1] + "--compare 8xH100,8xA100 --tokens 2B --price 2", "they don't cost the same"),
    (JOB[1] + "--compare 8xH100 -o x.yaml", "--output beside --compare"),
    (JOB[1] + "--compare 8xH100 --html x.html", "--html beside --compare"),
    (JOB[1] + "--compare 8xH100 --nodes 2", "--nodes beside --compare"),
    (JOB[1] + "--compare 8xH100,8xV100-32GB --attention flash", "flash doesn't run on V100"),
]


@pytest.mark.parametrize(("words", "message"), REFUSED)
def test_what_cannot_be_is_one_clear_error(
    words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refused = here("plan", *words.split())
    assert refused.code == (1 if "./no" in words or "Llama-3.1-8 " in words else 2)
    assert message in refused.text
    assert "fix: " in refused.text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "means"),
    [
        *((text, "8xH100") for text in ("8 H100", "8 x H100", "H100 x8", "H100 x 8", "H100x8", "8*H100", "1x8 H100")),
        *((text, "8xA100-40GB") for text in ("8 A100 40GB", "A100-40GB x 8", "A100 40GB x8")),
        *((text, "4x4090") for text in ("4090 x 4", "4 4090")),
        ("MI300X x 4", "4xMI300X"),
        ("2 x 8 H100", "2x8xH100"),
        ("RTX PRO 6000", "1xRTX PRO 6000"),
        ("4090", "1x4090"),
    ],
)
def test_gpus_are_read_in_any_usual_order(text: str, means: str) -> None:
    assert parse(text) == parse(means)


def test_a_count_after_the_name_is_written_as_one_before_it(tmp_path: Path) -> None:
    path = tmp_path / "made.yaml"
    assert here("config", "--yes", "--model", "gpt2", "--gpus", "H100 x 8", "-o", path).code == 0
    assert "--gpus 8xH100 " in path.read_text()
    assert here("plan", "--config", path).code == 0


def test_the_installed_torch_changes_no_plan(tmp_path: Path) -> None:
    """Torch 2.15 holds less in FSDP2's forward, but the one here may not be that of the cluster."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.15.0'\n")
    words = [sys.executable, "-m", "accel_fsdp", "plan", "--model", LLAMA, "--gpus", "8xH100", "--json"]
    plans = [run(words, PYTHONPATH=str(path)).output for path in (ROOT, f"{tmp_path}:{ROOT}")]
    assert json.loads(plans[0]) == json.loads(plans[1])


def test_offloaded_inputs_leave_the_gpu_for_the_host(tmp_path: Path) -> None:
    """`fsdp_activation_checkpointing_offload` moves one input of each layer: 32 x 8,192 tokens x 4,096 x 2 bytes."""
    path, plans = tmp_path / "made.yaml", []
    flags = ("--model", LLAMA, "--gpus", "8xH100-80GB")
    assert here("config", "--yes", *flags, "--activation-checkpointing", "true", "-o", path).code == 0
    for line in ("", "  fsdp_activation_checkpointing_offload: true\n"):
        path.write_text(path.read_text() + line)
        [row] = planned(*flags, "--config", path, "--seq-len", "8192", "--batch", "1")["strategies"]
        plans.append(row)
    inputs = 32 * 8192 * 4096 * 2
    kept, offloaded = plans
    assert offloaded["host_offload_bytes"] - kept["host_offload_bytes"] == 8 * inputs
    assert offloaded["sent_bytes"]["pcie"] - kept["sent_bytes"]["pcie"] == 2 * inputs
    assert offloaded["step_seconds"] > kept["step_seconds"]
    assert kept["phases"]["loss"] - offloaded["phases"]["loss"] == inputs


def test_a_resume_that_takes_more_than_a_step_is_said_with_what_takes_less(tmp_path: Path) -> None:
    """FSDP1 holds the optimizer's state twice while it loads."""
    said, sizes = {}, {}
    for version in ("1", "2"):
        path = tmp_path / f"fsdp{version}.yaml"
        flags = ("--model", LLAMA, "--gpus", "4xA100-40GB")
        assert here("config", "--yes", *flags, "--fsdp-version", version, "-o", path).code == 0
        job = ("--config", path, "--checkpointing", "full", "--seq-len", "512")
        said[version] = here("plan", *flags, *job, "--details").text
        [row] = planned(*flags, *job)["strategies"]
        sizes[version] = row["resume_bytes"] - row["peak_bytes"]
    assert sizes["2"] < 0 < sizes["1"]
    assert "less than a step takes" in said["2"]
    assert "That doesn't fit. FSDP2 loads in place" in said["1"]


def test_the_choice_fits_and_nothing_is_faster_by_more_than_a_prediction_can_tell() -> None:
    """Differences below the range of a step's time are ties; of these the one with least to bear is taken."""
    content = planned("--model", LLAMA, "--gpus", "8xH100-80GB", "--seq-len", "4096", "--checkpointing", "full")
    choice, ties, second = content["choice"], content["ties"], content["runner_up"]
    assert choice["strategy"] in ("FSDP2 FULL_SHARD", "FSDP2 SHARD_GRAD_OP")  # of equal ways those with fewest demands
    fastest = max(tie["tokens_per_s_per_gpu"] for tie in (choice, *ties))
    for tie in (choice, *ties):
        assert tie["fits"] == "yes"
        assert tie["tokens_per_s_per_gpu"] >= RANGE[0] * fastest
    assert second is None or second["tokens_per_s_per_gpu"] < RANGE[0] * fastest
    assert sum(choice["breakdown_bytes"].values()) == choice["peak_bytes"]


def problem_of(job: Job, memory: int | None) -> Problem:
    return Problem(*(trace_store.find(LLAMA) or pytest.fail("not bundled")), gpus.find("H100", memory), job)


def test_the_largest_micro_batch_fits_and_one_more_row_does_not() -> None:
    job = Job(Layout(Engine.FSDP2, 1, 8, 8), Recipe(length=2048, checkpointing="full"))
    problem = problem_of(job, 80)
    rows = search.largest(problem, job, "rows", search.MOST_ROWS)
    assert problem.evaluate(job.with_recipe(rows=rows)).fits
    at, above = (problem.has_room(job.with_recipe(rows=count)) for count in (rows, rows + 1))
    assert (at, above) == (True, False)


def test_the_plan_is_at_most_16_lines_and_ends_with_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 80 columns, in which what is to be copied counts as one line; also where nothing fits, or a strategy fails."""
    monkeypatch.setenv("COLUMNS", "80")
    for machine, more, verdict in (
        ("8xH100", (), "Take FSDP2"),
        ("4x8xA100-40GB", ("--method", "lora"), "Take "),
        ("4x8xH100", ("--optimizer", "adafactor"), "Take "),
        ("1xT4", (), "Nothing fits"),
        ("2xRTX4090", ("--global-batch", "64"), "Take "),
    ):
        shown = here("plan", "--model", LLAMA, "--gpus", machine, *more).output
        assert len(shown.splitlines()) <= 16, shown
        last = shown.splitlines()[-5:]
        assert any(line.startswith(verdict) for line in last), shown


@pytest.mark.parametrize(
    ("name", "machine", "layout"),
    [
        ("fsdp1_shard_grad_op", "8xH100", Layout(Engine.FSDP1, 2, 8, 8)),
        ("fsdp2_no_reshard", "8xH100", Layout(Engine.FSDP2, 2, 8, 8)),
        ("fsdp2_hybrid_2x8", "2x8xH100", Layout(Engine.FSDP2, 4, 16, 8)),
        ("fsdp2_offload", "8xH100", Layout(Engine.FSDP2, 1, 8, 8, offload=True)),
        ("zero3", "8xH100", Layout(Engine.DEEPSPEED, 3, 8, 8)),
        ("ddp", "8xH100", Layout(Engine.DDP, 1, 8, 8)),
    ],
)
def test_a_yaml_is_predicted_as_it_is(name: str, machine: str, layout: Layout) -> None:
    path = CONFIGS / f"{name}.yaml"
    [row] = planned("--config", path, "--model", LLAMA, "--gpus", machine)["strategies"]
    recipe = from_arguments.recipe_of(parse_command_line(script_arguments(path.read_text())))
    if "fsdp_activation_checkpointing: true" in path.read_text():
        recipe = replace(recipe, checkpointing="full")
    job = Job(layout, recipe)
    assert row["peak_bytes"] == problem_of(job, None).evaluate(job).device.allocated


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_the_table_of_the_zero_paper(stage: int, gigabytes: float) -> None:
    """7.5 billion parameters on 64 GPUs (arXiv 1910.02054, figure 1): weights, gradients and Adam, without buckets."""
    layer = Block("Layer", tuple(range(30)), (Parameter("weight", (25_000, 10_000), "linear"),))
    shape = ModelShape("paper", "none", 10_000, 1, 1, 1, (layer,), (), tied=False)
    recipe, meter = Recipe(), Meter()
    layout = Layout(Engine.DEEPSPEED, stage, 64, 8) if stage else Layout(Engine.DDP, 1, 64, 8)  # 16 bytes each
    units = step.units_of(shape, recipe, layout)
    engine = step.ENGINES[layout.engine](meter, [unit for unit in units if unit.parameters], [1] * 30, recipe, layout)
    engine.load()
    engine.make_states()
    for number, unit in enumerate(engine.units):
        grad_bytes = sum(element.numel for element in unit.parameters) * (2 if stage else 4)
        meter.add(GRADIENTS, grad_bytes)
        engine.after_backward(number, grad_bytes)
    held = sum(meter.live[kind] for kind in (PARAMETERS, GRADIENTS, OPTIMIZER)) / 1e9
    assert round(held, 1) == gigabytes


@pytest.mark.parametrize(
    ("name", "old", "new", "machine", "message"),
    [
        ("fsdp2", "mixed_precision: bf16", "mixed_precision: fp8", "8xH100", "mixed_precision: fp8 can't be predicted"),
        ("zero3", "zero_stage: 3", "zero_stage: 9", "8xH100", "zero_stage: 9 can't be predicted"),
        ("zero3", "zero_stage: 3", "zero_stage: three", "8xH100", "zero_stage: three can't be predicted"),
        ("fsdp2", "num_machines: 1", "num_machines: 2", "8xH100", "the YAML has num_machines: 2"),
        ("ddp", "MULTI_GPU", "MULTI_CPU", "8xH100", "a job for CPUs can't be predicted"),
        ("fsdp2", "TRANSFORMER_BASED_WRAP", "NO_WRAP", "8xH100", "makes one unit of the whole model, can't be"),
        ("fsdp2", "num_machines: 1", "num_machines: 1", "4xH100", "8 processes"),
        ("fsdp2", "num_processes: 8", "num_processes: 4", "", "--gpus is missing"),
    ],
)
def test_a_yaml_that_cannot_be_predicted_is_refused(
    name: str, old: str, new: str, machine: str, message: str, tmp_path: Path
) -> None:
    path, text = tmp_path / "job.yaml", (CONFIGS / f"{name}.yaml").read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    shown = here("plan", "--config", path, *(("--model", LLAMA, "--gpus", machine) if machine else ()))
    assert (shown.code, message in shown.text) == (2, True), shown.output


def test_one_process_is_predicted_whatever_num_processes_says(tmp_path: Path) -> None:
    path = tmp_path / "alone.yaml"
    path.write_text("distributed_type: 'NO'\nmixed_precision: bf16\nnum_processes: 8\n")
    assert planned("--model", "gpt2", "--gpus", "1xH100-80GB", "--config", str(path))["gpus"] == 1


def test_advice_for_a_yaml_that_does_not_fit_names_the_strategy_it_is_about() -> None:
    path = CONFIGS / "ddp.yaml"
    shown = here("plan", "--model", "llama-3.1-8b", "--gpus", "8xH100-80GB", "--config", path)
    assert shown.code == 1
    assert f"What would fit: accel-fsdp migrate {path} --to fsdp2; or" in shown.text


def test_a_checkpoint_of_an_adapter_is_the_adapter_s() -> None:
    choice = planned("--model", LLAMA, "--gpus", "8xH100", "--method", "lora", "--lora-rank", "16")["choice"]
    trained = 16 * 32 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336))  # q, o; k, v; gate, up, down
    assert (choice["checkpoint_bytes"], choice["export_bytes"]) == (12 * trained, 4 * trained)


def test_a_checkpoint_takes_the_same_from_any_number_of_gpus() -> None:
    for machine in ("8xH100", "2048x8xH100"):
        rows = planned("--model", LLAMA, "--gpus", machine)["strategies"]
        sizes = {row["checkpoint_bytes"] for row in rows if row["strategy"] == "FSDP2 FULL_SHARD"}
        assert sizes == {12 * 8_030_261_248}


def test_the_default_length_is_the_model_s_where_it_has_fewer_positions() -> None:
    assert planned("--model", "gpt2", "--gpus", "8xH100")["sequence_length"] == 1024
    assert planned("--model", "llama-3.1-8b", "--gpus", "8xH100")["sequence_length"] == 2048


def test_stored_buffers_are_loaded_by_every_rank_under_fsdp2(tmp_path: Path) -> None:
    """FSDP2 can't fill them from rank 0, so the YAML turns that off: plan and YAML count the same memory."""
    machine = ("--model", "deepseek-ai/DeepSeek-V3", "--gpus", "16x8xH200", "--method", "lora", "--seq-len", "4096")
    yaml = tmp_path / "fsdp.yaml"
    here("config", "--yes", "-o", yaml, *machine, "--fsdp-version", "2")
    assert "fsdp_cpu_ram_efficient_loading: false" in yaml.read_text()
    assert "Loading takes" in here("plan", "--config", yaml).text
    assert planned(*machine)["choice"] is None


def test_fewer_than_the_margin_is_no_misfit(tmp_path: Path) -> None:
    yaml = tmp_path / "fsdp.yaml"
    job = ("--model", "llama-3.1-8b", "--gpus", "2xH100", "--batch", "2", "--activation-checkpointing", "false")
    here("config", "--yes", "-o", yaml, *job, "--cpu-offload", "false")
    assert "It may run out of memory: it needs 77.6 of 79.1 GiB" in here("plan", "--config", yaml).text
    assert "predicted to fit without the margin" in here("check", yaml).text


def test_a_fused_loss_is_offered_with_the_checkpointing_that_a_search_tries() -> None:
    job = ("--model", "llama-3.1-8b", "--gpus", "8xH100", "--batch", "24", "--seq-len", "2048")
    assert planned(*job)["changes"][0].startswith("--use_liger_kernel true")
