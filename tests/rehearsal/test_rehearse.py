"""`accel-fsdp rehearse` on real ranks, as users run it: every step of a job in small, and nothing left behind."""

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from conftest import ROOT, SFT, accel_fsdp, warm_python

from accel_fsdp import command_line
from accel_fsdp.config import JobConfig
from accel_fsdp.rehearsal import janitor, scaled, small_run

CONFIGS = ROOT / "accelerate_configs"
BEFORE = ["check", "make the model small", "read the arguments"]
RESUMED = [*BEFORE, "train in bf16", "train and save", "resume after SIGKILL"]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("name", "holds"),
    [
        ("fsdp2_lora", "FSDP2, 5 units; a rank holds at most 319,808 of 639,616 weights"),
        ("fsdp1_hybrid_shard", "FSDP1 HYBRID_SHARD, 3 units; a rank holds at most 278,848 of 557,696 weights"),
        ("zero2", "a rank holds all 557,696 weights, and the optimizer's states of 278,848 of 557,696"),
    ],
)
def test_every_step_passes(name: str, holds: str) -> None:
    words = ["--", "--async_checkpoints"] if name == "fsdp2_lora" else []
    finished = accel_fsdp("rehearse", CONFIGS / f"{name}.yaml", "--json", *words)
    report = json.loads(finished.output[finished.output.index("{\n") :])
    assert finished.code == 0, finished.output
    names = [step["name"] for step in report["steps"]]
    alone = "compare with one process" if name == "zero2" else "resume on 1 rank"
    assert names == [*RESUMED, alone, "export and reload"]
    assert all(step["passed"] for step in report["steps"])
    assert holds in report["steps"][3]["said"]
    steps = "1 to 4" if name == "zero2" else "3 to 4"
    assert f"losses of steps {steps} are those of one process" in report["steps"][6]["said"]
    for step in report["steps"][3:6:2] if name != "zero2" else ():
        assert "gradients and weights of the first 2 steps are those of one process" in step["said"]
        assert "not repeated" not in step["said"]


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """The name of a socket has at most 107 letters."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


RANKS_TRAIN = 5
"""Its folder, the server of its processes with its tracker, and two ranks."""


@contextmanager
def rehearsing(folder: Path) -> Iterator["subprocess.Popen[str]"]:
    """A rehearsal that keeps its things in `folder`, once its ranks train."""
    warm = warm_python()
    words = [warm.pop("PYTHON_EXEC"), "-m", "accel_fsdp", "rehearse", str(CONFIGS / "fsdp2.yaml")]
    environment = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(ROOT), **warm}  # what it starts is cold
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )
    try:
        assert process.stdout
        for line in process.stdout:
            if "make the model small" in line:
                break
        until = time.monotonic() + 120
        while len(left(folder)) < RANKS_TRAIN:
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
        yield process
    finally:
        process.kill()
        process.communicate()


def left(folder: Path) -> list[object]:
    """Processes of a rehearsal in this folder, and what lies there."""
    left: list[object] = list(folder.iterdir())
    for process in psutil.process_iter():
        try:
            place = process.environ().get(janitor.FOLDER, "")
        except (psutil.Error, OSError):
            continue
        if place.startswith(str(folder)) and process.status() != psutil.STATUS_ZOMBIE:
            left.append(process)
    return left


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda signal_number: signal_number.name
)
def test_nothing_is_left_behind(number: signal.Signals, short_folder: Path) -> None:
    with rehearsing(short_folder) as process:
        process.send_signal(number)
        output = process.communicate(timeout=30)[0]
    end = time.monotonic() + 20
    while left(short_folder) and time.monotonic() < end:
        time.sleep(0.2)
    assert left(short_folder) == []
    codes = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}
    assert process.returncode == codes[number]
    assert number == signal.SIGKILL or "nothing is left" in output


def test_arguments_that_the_real_job_refuses(tiny_model: Path) -> None:
    words = ["--save_strategy", "epoch", "--load_best_model_at_end", "true", "--eval_strategy", "steps"]
    finished = accel_fsdp("rehearse", CONFIGS / "fsdp2.yaml", "--model", tiny_model, "--", *words)
    assert finished.code == 1
    assert "FAILED read the arguments" in finished.output
    assert "--load_best_model_at_end requires the save and eval strategy to match" in finished.output


def test_what_is_not_given_is_taken_from_the_yamls_comment() -> None:
    comment = ("--model_name_or_path", "me/model", "--use_peft", "--lora_r", "8")
    assert command_line.with_defaults(("--lora_r", "16"), comment) == (*comment[:3], "--lora_r", "16")


def test_a_rehearsal_profiles_no_step_of_the_real_job() -> None:
    """Such a step would come long after its own few."""
    assert small_run.replaced(("--profile_steps", "300:302", "--lora_r", "16")) == ["--profile_steps"]


def test_the_check_comes_before_what_cannot_be_rehearsed(tmp_path: Path) -> None:
    text = (CONFIGS / "fsdp2.yaml").read_text()
    (tmp_path / "job.yaml").write_text(text.replace("distributed_type: FSDP", "distributed_type: FSPD"))
    finished = accel_fsdp("rehearse", tmp_path / "job.yaml")
    assert finished.code == 1
    assert "FAILED check" in finished.output
    assert "Did you mean FSDP?" in finished.output


@pytest.mark.parametrize("before", [["--model"], ["--", "--model_name_or_path"]], ids=["flag", "argument"])
def test_the_check_takes_the_model_that_is_named(before: list[str], tiny_model: Path, tmp_path: Path) -> None:
    text = (CONFIGS / "fsdp2.yaml").read_text()
    assert "LlamaDecoderLayer" in text
    (tmp_path / "job.yaml").write_text(text.replace("LlamaDecoderLayer", "GPT2Block"))
    finished = accel_fsdp("rehearse", tmp_path / "job.yaml", *before, tiny_model)
    assert finished.code == 1
    assert "FAILED check" in finished.output
    assert f"AF501: {tiny_model} has no GPT2Block" in " ".join(finished.output.split())
    assert "fix: fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer" in finished.output


@pytest.mark.parametrize("flags", [["--processes", "0"], ["--timeout", "-1"]])
def test_numbers_that_mean_nothing(flags: list[str]) -> None:
    finished = accel_fsdp("rehearse", CONFIGS / "fsdp2.yaml", *flags)
    assert finished.code == 2
    assert finished.output.startswith(f"error: {' '.join(flags)}")


def test_json_says_why_a_job_cannot_be_rehearsed(tmp_path: Path) -> None:
    """Nothing was written where the YAML was refused before the first step."""
    broken, tpu = tmp_path / "broken.yaml", tmp_path / "tpu.yaml"
    broken.write_text("fsdp_config: [")
    tpu.write_text((CONFIGS / "tpu.yaml").read_text())
    for file in (broken, tpu):
        finished = accel_fsdp("rehearse", "--json", file)
        assert finished.code == 2, finished.output
        report = json.JSONDecoder().raw_decode(finished.output[finished.output.index("{\n") :])[0]
        assert not report["passed"]
        assert report["error"].splitlines()[0] in finished.output


def test_a_script_without_its_flag_is_told_the_flag() -> None:
    finished = accel_fsdp("rehearse", CONFIGS / "fsdp2.yaml", "mine.py", "--", "--lr", "1")
    assert finished.code == 2
    assert finished.output == (
        "error: accel-fsdp rehearse does not take the word mine.py\n  why: nothing was done\n  fix: --script mine.py\n"
    )


@pytest.mark.slow
def test_train_sft_draws_the_same_dropout_again_under_fsdp2s_checkpointing(
    tiny_model: Path, text_data: Path, tmp_path: Path
) -> None:
    """Accelerate's own wrapper doesn't (1.15); a rehearsal of any script names that."""
    text = (CONFIGS / "fsdp2_checkpointing.yaml").read_text()
    (tmp_path / "job.yaml").write_text(text.replace("mixed_precision: bf16", "mixed_precision: 'no'"))
    model = shutil.copytree(tiny_model, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.5}))
    words = ["--model_name_or_path", model, "--dataset_name", text_data, "--max_steps", "1"]
    words += ["--per_device_train_batch_size", "2", "--output_dir"]
    for more in ([], ["--use_peft", "--lora_dropout", "0.5"]):
        places = [*words, tmp_path / f"out{len(more)}", *more]
        finished = accel_fsdp("rehearse", tmp_path / "job.yaml", "--script", SFT, "--", *places)
        assert finished.code == 0, finished.output


def job(**values: object) -> JobConfig:
    return JobConfig({"distributed_type": "FSDP", "num_processes": 16, "num_machines": 2, **values})


def test_hybrid_of_fsdp1_has_two_nodes() -> None:
    small, _ = scaled.scale(job(fsdp_config={"fsdp_sharding_strategy": 4}))
    assert (small.number("num_processes"), scaled.machines_of(small)) == (4, 2)
    assert scaled.machines_of(scaled.without_mesh(small, 3)) == 1  # the resume of 6 ranks on 3, which can't be halved


def test_units_chosen_by_size_shrink_with_the_layers() -> None:
    given = {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 196_300_800}
    small, changes = scaled.with_smaller_units(job(fsdp_config=given), real=218_112_000, small=213_248)
    assert small.fsdp("fsdp_min_num_params") == 191_923
    assert changes == ["fsdp_min_num_params 196300800 -> 191923"]
    by_class = job(fsdp_config=given | {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"})
    assert scaled.with_smaller_units(by_class, real=218_112_000, small=213_248) == (by_class, [])


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_whoever_was_forked_meanwhile_does_not_keep_the_janitor_waiting() -> None:
    """As the workers of a DataLoader in the test's own process: they hold the janitor's pipe open."""
    with janitor.folder() as place:
        child = os.fork()
        if not child:
            time.sleep(100)
            os._exit(0)
    assert not place.exists()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
