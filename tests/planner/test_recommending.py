"""What `accel-fsdp plan` recommends: it works, it fits, its YAML can be written, it is no larger than need be."""

import html
import shlex
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, SFT, here, planned

from accel_fsdp import planner
from accel_fsdp.config import Engine, Method
from accel_fsdp.hardware import gpus
from accel_fsdp.linter.rules import Subject, run
from accel_fsdp.models import catalogue
from accel_fsdp.planner import proposal, text_report
from accel_fsdp.prediction import trace_store
from accel_fsdp.units import GIB
from accel_fsdp.wizard import to_yaml

CONFIGS = ROOT / "accelerate_configs"
LLAMA = "llama-3.1-8b"
MIXTRAL = "mistralai/Mixtral-8x7B-Instruct-v0.1"


def shown(*flags: str | Path) -> str:
    return here("plan", *flags, "--details").text


def plan_report(model: str, machine: str, method: Method = "full") -> text_report.PlanReport:
    return planner.make_plan(planner.PlanCommand(model, machine, method=method))


@pytest.mark.parametrize(
    "flags",
    [
        ("--model", LLAMA, "--gpus", "8xH100-80GB"),
        ("--model", LLAMA, "--gpus", "2x4090", "--method", "lora"),
        ("--model", MIXTRAL, "--gpus", "4x8xH100"),
        ("--model", LLAMA, "--gpus", "8xT4"),
        ("--model", LLAMA, "--gpus", "8xH100", "--optimizer", "adafactor", "--global-batch", "64"),
        ("--model", LLAMA, "--gpus", "8xH100", "--seq-len", "16384"),
        ("--model", "gpt2", "--gpus", "8xH100", "--seq-len", "1024"),  # the wizard's own length of it
    ],
)
def test_what_is_recommended_can_be_written_and_fits_as_it_was_said(flags: tuple[str, ...], tmp_path: Path) -> None:
    """The command writes the YAML of -o, the linter finds nothing in it, and its own plan has the same peak."""
    own, path, line = (tmp_path / name for name in ("own.yaml", "fsdp.yaml", "arguments"))
    content = planned(*flags, "-o", own)
    choice, script, words = content["choice"], content["script_arguments"], shlex.split(content["config_command"])
    assert words[:5] == ["accel-fsdp", "config", "--yes", "-o", "fsdp.yaml"]
    assert ("--seq-len" in words) == ("16384" in flags)
    assert here("config", "--yes", "-o", path, *words[5:]).code == 0
    short, whole = (file.read_text().splitlines() for file in (path, own))
    at = short.index("# Launch:") + 1
    assert short[:at] + short[at + 1 :] == whole[:at] + whole[at + 1 :]
    by_wizard, launched = (shlex.split(lines[at].removeprefix("#")) for lines in (short, whole))
    starter = "accel-fsdp" if "4x8xH100" in flags else "accelerate"
    assert launched[:3] == ["PYTORCH_ALLOC_CONF=expandable_segments:True", starter, "launch"]
    assert by_wizard[by_wizard.index("--max_length") + 1] == str(content["sequence_length"])
    assert planned("--config", path)["sequence_length"] == content["sequence_length"]
    line.write_text(shlex.join(launched))
    checked = here("check", path, "--args", line, "--model", content["model"], "--strict")
    assert checked.code == 0, checked.output
    assert {name: launched[launched.index(f"--{name}") + 1] for name in script} == {
        name: to_yaml.flag_text(value) for name, value in script.items()
    }
    batch = ("--batch", str(choice["batch_per_gpu"]), "--accumulation", str(choice["accumulation"]))
    checkpointing = ("--checkpointing", "full") if "gradient_checkpointing" in script else ()
    rest = [flag for flag in flags if flag not in ("--global-batch", "64")]
    judged = planned(*rest, *batch, *checkpointing, "--config", path)["strategies"][0]
    assert (judged["fits"], judged["peak_bytes"]) == ("yes", choice["peak_bytes"])
    assert choice["fits"] == "yes"


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_of_one_gpu_a_yaml_without_an_engine_is_written(method: str, tmp_path: Path) -> None:
    """The linter finds nothing in it, it can be predicted, and it starts."""
    path = tmp_path / "own.yaml"
    asked = ("--model", "gpt2", "--gpus", "1xH100", "--method", method)
    chosen = planned(*asked, "-o", path)["choice"]
    how = ("--checkpointing", chosen["checkpointing"], "--batch", str(chosen["batch_per_gpu"]))
    judged = planned(*asked, "--config", path, *how)["strategies"][0]
    assert (judged["strategy"], judged["peak_bytes"]) == ("one GPU", chosen["peak_bytes"])
    text = path.read_text()
    assert "distributed_type: 'NO'\nmixed_precision: bf16\nnum_processes: 1\n" in text
    assert "--dataset_name train/data/fsdp_chat --output_dir runs/first --per_device_train_batch_size" in text
    assert here("check", "--strict", "--model", "gpt2", path).code == 0
    assert "ACCELERATE_MIXED_PRECISION=bf16" in here("launch", "--dry-run", path, SFT).output


def test_where_nothing_fits_no_yaml_is_written_and_the_exit_code_says_so(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    done = here("plan", "--model", "llama-3.1-70b", "--gpus", "1xRTX4090", "-o", path)
    assert (done.code, path.exists()) == (1, False)
    assert f"warning: {path} was NOT written: nothing fits" in done.output


MACHINES = ("1xA100", "2xRTX4090", "8xA100-40GB", "8xH100", "4x8xH100")


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("place", "method"), [(0, "full"), (1, "lora"), (2, "qlora")])
def test_whatever_is_recommended_passes_the_linter_and_fits(place: int, method: Method) -> None:
    """A third of the catalogue with each method: wizard, linter and memory agree with the choice and its equals."""
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
            faults = run(Subject(values, args=proposal.arguments(candidate.job)))
            # AF403: the address of machine 0 is known where a job starts.
            assert [f for f in faults if f.severity != "note" and f.code != "AF403"] == [], name


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("flags", "choice"),
    [
        (("llama-3.1-405b", "--gpus", "4x8xH100", "--method", "lora"), "FSDP2 FULL_SHARD"),
        (("deepseek-v3", "--gpus", "64x8xH100"), None),
        ((LLAMA, "--gpus", "8xH100", "--host-memory", "100"), "FSDP2 FULL_SHARD"),
        ((LLAMA, "--gpus", "8xH100", "--host-memory", "20"), None),
    ],
)
def test_what_is_recommended_can_be_loaded(flags: tuple[str, ...], choice: str | None) -> None:
    """Each rank of ZeRO and DDP reads the whole model, and one of FSDP's; without enough memory nothing fits."""
    content = planned("--model", *flags)
    taken = [content["choice"], *content["ties"], content["runner_up"]] if choice else []
    assert (content["choice"] and content["choice"]["strategy"]) == choice
    assert all(row["host_loading_bytes"] <= content["host_memory_bytes"] for row in taken if row)
    if "--host-memory" in flags:
        zero = next(row for row in content["strategies"] if row["strategy"] == "ZeRO-3")
        loading = f"239 GiB of memory on each machine, which has {flags[-1]} GiB"
        assert (zero["fits"], zero["refused"]) == ("fails", f"Loading takes {loading}")
        assert choice or content["changes"][-1].startswith("machines with 30 GiB of memory")


@pytest.mark.parametrize(
    ("name", "edit", "more", "needs", "changes"),
    [
        ("ddp", "", ("--method", "lora"), "Loading takes 120 GiB", ["accel-fsdp migrate ", "machines with 120 GiB"]),
        ("zero3", "", ("--method", "lora"), "Loading takes 120 GiB", ["accel-fsdp migrate ", "machines with 120 GiB"]),
        (
            *("fsdp2", "efficient_loading: true", (), "Loading takes 239 GiB"),
            ["fsdp_cpu_ram_efficient_loading: true", "machines with 239 GiB"],
        ),
        ("fsdp2_offload", "", (), "CPU offload takes 120 GiB", ["--use_peft true", "machines with"]),
    ],
)
def test_a_yaml_whose_job_a_machine_cannot_load_does_not_fit(
    name: str, edit: str, more: tuple[str, ...], needs: str, changes: list[str], tmp_path: Path
) -> None:
    text = (CONFIGS / f"{name}.yaml").read_text()
    path, page = tmp_path / "job.yaml", tmp_path / "plan.html"
    assert edit in text
    path.write_text(text.replace(edit, edit.replace("true", "false")) if edit else text)
    job = ("--config", path, "--model", LLAMA, "--gpus", "8xH100", "--host-memory", "100", *more)
    content = planned(*job)
    [row] = content["strategies"]
    lack = f"{needs} of memory on each machine, which has 100 GiB"
    assert (content["choice"], row["fits"], row["refused"]) == (None, "fails", lack)
    assert [sum(change.startswith(start) for change in content["changes"]) for start in changes] == [1, 1]
    finished = here("plan", *job, "--html", page)
    assert finished.code == 1
    assert f"It doesn't fit: {lack}. What would fit:" in finished.text
    assert f"<strong>It doesn't fit: {lack}. What would fit: " in html.unescape(page.read_text())


@pytest.mark.parametrize("optimizer", ["adafactor", "adamw_8bit"])
def test_an_optimizer_that_crashes_under_fsdp2_never_comes_with_it(optimizer: str) -> None:
    content = planned("--model", LLAMA, "--gpus", "8xH100", "--optimizer", optimizer)
    rows = {row["strategy"]: row for row in content["strategies"]}
    assert rows["FSDP2 FULL_SHARD"]["fits"] == "fails"
    assert rows["FSDP2 FULL_SHARD"]["refused"]
    assert content["choice"] is None or not content["choice"]["strategy"].startswith("FSDP2")


def test_experts_that_fsdp2_pads_are_sharded_by_an_engine_that_cuts_through_them() -> None:
    content = planned("--model", MIXTRAL, "--gpus", "4x8xH100")
    choice = content["choice"]
    assert choice["strategy"] == "FSDP1 FULL_SHARD"
    by_offload = 3_600  # tokens/s of FSDP2 with offload, the fastest of DDP and FSDP2
    assert choice["tokens_per_s_per_gpu"] > by_offload


@pytest.mark.slow
def test_what_is_known_of_published_weights_is_said() -> None:
    """gpt-oss has eager attention alone, whatever is asked."""
    job = ("--model", "gpt-oss-20b", "--gpus", "8xH100", "--seq-len", "4096")
    eager = planned(*job)["strategies"]
    assert all(planned(*job, "--attention", asked)["strategies"] == eager for asked in ("sdpa", "flash", "eager"))
    text = shown(*job, "--attention", "flash")
    assert "runs eager attention; so does this plan" in text
    assert "MXFP4" in text
    assert "published in FP8" in shown("--model", "DeepSeek-R1", "--gpus", "8xH100", "--method", "lora")


@pytest.mark.slow
def test_what_fits_is_proposed_and_offload_is_not_led_with() -> None:
    for model, machine, more, first in (
        ("llama-3.1-70b", "1xA100-80GB", (), "--method qlora"),
        ("meta-llama/Llama-3.1-405B", "8xH100", (), "--method "),  # offload would take 6,048 GiB of memory
        ("meta-llama/Llama-3.1-405B", "2xT4", (), ""),  # a gathered layer is larger
        ("gpt-oss-20b", "2x4090", ("--method", "qlora", "--optimizer", "adamw_8bit"), "--optimizer adamw_torch_fused"),
    ):
        content = planned("--model", model, "--gpus", machine, *more)
        assert content["choice"] is None
        assert content["changes"][0].startswith(first) if first else content["changes"] == []
    told_more = planned("--model", "meta-llama/Llama-3.1-405B", "--gpus", "8xH100", "--host-memory", "8000")
    assert told_more["choice"]["strategy"] == "FSDP2 FULL_SHARD offload"
    proposed = planned("--model", "llama-3.1-70b", "--gpus", "1xA100-80GB", "--method", "qlora")["choice"]
    assert (proposed["fits"], proposed["checkpointing"]) == ("yes", "full")


def test_each_way_that_fails_has_its_own_reason() -> None:
    output = shown("--model", LLAMA, "--gpus", "8xH100", "--method", "qlora")
    assert "fails, unless the script is train/sft.py: FSDP1. " in output
    assert "FSDP1. PEFT loses the adapter under FSDP1: the exported adapter has no tensors. " in output
    assert "fails: DeepSpeed. ZeRO-3 can't partition 4-bit weights, and with ZeRO-1 and" in output


@pytest.mark.parametrize("total", [8, 64, 96, 1024])
def test_a_global_batch_is_met_exactly(total: int) -> None:
    content = planned("--model", LLAMA, "--gpus", "8xH100", "--global-batch", str(total))
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
    assert content["schema_version"] == text_report.SCHEMA_VERSION
    assert content["gpu_memory_sold_gib"] == 80
    assert content["gpu_memory_usable_bytes"] == round(gpus.find("H100").usable_gib * GIB)


def test_the_table_explains_itself() -> None:
    job = ("--model", LLAMA, "--gpus")
    tight = here("plan", *job, "8xA100-40GB", "--checkpointing", "full", "--batch", "7", "--details")
    assert any(" tight " in line for line in tight.output.splitlines())
    assert "tight: with less, and may run out" in tight.text
    text = shown(*job, "8xH100")
    for words in ("with 2.0 GiB for CUDA and NCCL", "tokens/s per GPU"):
        assert words in text
    assert " row" not in text + tight.text


def test_the_layer_class_of_another_model_is_no_fit(tmp_path: Path) -> None:
    path = tmp_path / "fsdp.yaml"
    path.write_text((CONFIGS / "fsdp2.yaml").read_text().replace("LlamaDecoderLayer", "GPT2Block"))
    refused = here("plan", "--model", LLAMA, "--gpus", "8xH100", "--config", path)
    assert refused.code == 1
    text = refused.text
    assert "has no GPT2Block" in text
    assert "Accelerate stops" in text
    assert "It fits" not in text


def test_the_verdict_is_that_of_what_is_needed_and_the_margin() -> None:
    """With longer and longer rows a job fits, then does so without the margin, then not."""
    job = ("--model", LLAMA, "--method", "lora", "--checkpointing", "full", "--batch", "8")
    seen = []
    for length in range(1024, 8192, 256):
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
    flags = ("--model", LLAMA, "--gpus", "8xMI250X", "--seq-len", "4096")
    content = planned(*flags)
    for row in (*content["strategies"], content["choice"]):
        room = content["gpu_memory_usable_bytes"] - row["needed_bytes"] + row["peak_bytes"]
        assert (row["fits"] == "yes") == (row["peak_bytes"] * 1.2 <= room) or row["fits"] == "fails"
    here("plan", *flags, "-o", tmp_path / "fsdp.yaml")
    assert "PYTORCH_ALLOC_CONF" not in (tmp_path / "fsdp.yaml").read_text()
    assert "20% for fragmentation, as expandable segments may hang under ROCm" in shown(*flags)


def test_packed_rows_and_evaluations_take_memory(tmp_path: Path) -> None:
    yaml, line = tmp_path / "fsdp.yaml", tmp_path / "arguments"
    machine = ("--model", LLAMA, "--gpus", "4xA100-80GB")
    assert here("config", "--yes", "-o", yaml, *machine, "--method", "lora").code == 0

    def judged(more: str) -> dict[str, Any]:
        line.write_text(f"accelerate launch train/sft.py --use_peft true --lora_dropout 0 --max_length 4096 {more}\n")
        report = planned(*machine, "--config", yaml, "--args", line)
        row: dict[str, Any] = report["strategies"][0]
        return {**row, "changes": report["changes"]}

    packed = "--per_device_train_batch_size 2 --packing"
    masked, flash = (
        judged(f"{packed} {more}")["peak_bytes"] for more in ("true", "true --attn_implementation flash_attention_2")
    )
    assert masked - flash >= 32 * 2 * 4096 * 4096 * 2  # sdpa keeps the mask as floats for backward, once per layer
    steps = "--per_device_train_batch_size 1 --gradient_checkpointing true"
    # an evaluation's forward saves nothing, but has all logits; Trainer evaluates 8 rows unless it is told otherwise
    evaluated = judged(f"{steps} --max_steps 10 --eval_strategy steps")
    assert evaluated["peak_phase"] == "evaluation"
    assert evaluated["peak_bytes"] - evaluated["steady_bytes"] > 8 * 8 * 4096 * 128256
    steps += " --packing true --eval_strategy steps"
    refused = judged(f"{steps} --per_device_eval_batch_size 64")
    assert refused["fits"] == "no"
    assert refused["changes"][0].startswith("--per_device_eval_batch_size ")
    assert judged(f"{steps} {refused['changes'][0]}")["fits"] != "no"
