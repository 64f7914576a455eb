"""`--checkpoint_uri`: runs whose checkpoints are in an object store, which a real S3 server holds here."""

import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from conftest import ROOT, SFT, Finished, accel_fsdp, accelerate_launch
from stores import KEYS, S3, s3  # noqa: F401  # a fixture
from test_training import make_config, sft_args

from accel_fsdp.checkpoints import file_names, marker

Sft = Callable[..., Finished]
STEPS = ("--max_steps", "6", "--save_steps", "2", "--lr_scheduler_type", "constant")


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in marker.files_in(folder)}


def test_a_run_goes_on_from_the_store_alone(
    s3: S3,  # noqa: F811
    sft: Sft,
    tiny_model: Path,
    text_data: Path,
    tmp_path: Path,
) -> None:
    """The first machine is lost with its disk after four steps; the second one has an empty disk and other ranks."""
    config, uri = make_config(tmp_path, tiny_model), s3.make("bucket")
    lost, here, straight = (tmp_path / name for name in ("lost", "here", "straight"))
    whole = accelerate_launch(config, SFT, *sft_args(tiny_model, text_data, straight, *STEPS))
    assert whole.code == 0, whole.output

    stop = ("--max_steps", "4", "--checkpoint_uri", uri, "--save_total_limit", "1", "--async_checkpoints")
    first = accelerate_launch(config, SFT, *sft_args(tiny_model, text_data, lost, *STEPS, *stop))
    assert first.code == 0, first.output
    assert re.search(rf"checkpoint-4 is at {uri}: [\d.]+ MB in", first.output)
    there = {name.removeprefix("runs/first/"): size for name, size in s3.names("bucket").items()}
    kept = {name: size for name, size in there.items() if name.startswith("checkpoint-")}
    assert {name.partition("/")[0] for name in kept} == {"checkpoint-4"}
    assert kept == {f"checkpoint-4/{name}": len(text) for name, text in content(lost / "checkpoint-4").items()}
    for name, text in content(lost / "checkpoint-4").items():
        assert s3.read("bucket", f"runs/first/checkpoint-4/{name}") == text
    assert [path.name for path in file_names.checkpoints(lost)] == ["checkpoint-4"]
    local = content(lost / "checkpoint-4")

    exported = accel_fsdp("export", lost, tmp_path / "local", "--verify", "bytes")
    assert exported.code == 0, exported.output
    shutil.rmtree(lost)
    exported = accel_fsdp("export", uri, tmp_path / "stored", "--verify", "bytes")
    assert exported.code == 0, exported.output
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("local", "stored")]
    assert weights[0] == weights[1]
    assert not list(tmp_path.glob(".fetched-*"))

    again = sft_args(tiny_model, text_data, here, *STEPS, "--checkpoint_uri", uri)
    refused = sft(*again)
    assert refused.code == 1
    assert f"error: {uri} already holds a run" in refused.output
    s3.asked.clear()
    resumed = accelerate_launch(config, SFT, *again, "--resume_from_checkpoint", "auto")
    assert resumed.code == 0, resumed.output
    assert f"fetching checkpoint-4 from {uri}" in resumed.output
    assert content(here / "checkpoint-4") == local
    assert not [path for method, path in s3.asked if method == "PUT" and "checkpoint-4" in path]
    ends = [(run / "final" / "model.safetensors").read_bytes() for run in (straight, here)]
    assert ends[0] == ends[1]
    assert not list(here.glob(".*arriving"))
    assert "runs/first/checkpoint-6/complete.json" in s3.names("bucket")
    for output in (first.output, resumed.output, *(path.read_text() for path in here.glob("run.json"))):
        assert KEYS["AWS_SECRET_ACCESS_KEY"] not in output


def test_a_store_that_fails_delays_no_step(
    s3: S3,  # noqa: F811
    tiny_model: Path,
    text_data: Path,
    tmp_path: Path,
) -> None:
    """It is slow, then busy, then down; a file of the second rank is refused twice after it is up again."""
    uri, refusals = s3.make("bucket"), [*["SlowDown"] * 8, *["InvalidAccessKeyId"] * 2]
    s3.seconds = 0.05

    def refuses(method: str, path: str) -> str:
        is_late = len(refusals) <= 2
        return refusals.pop(0) if refusals and method == "PUT" and ("__1_0" in path or not is_late) else ""

    def fail() -> None:
        while not any(method == "PUT" for method, _ in s3.asked):
            time.sleep(0.05)
        s3.stop()
        time.sleep(3)
        s3.refuses = refuses
        s3.start()

    thread = threading.Thread(target=fail)
    thread.start()
    args = sft_args(tiny_model, text_data, tmp_path / "run", *STEPS, "--checkpoint_uri", uri)
    finished = accelerate_launch(make_config(tmp_path, tiny_model), SFT, *args, "--save_total_limit", "1")
    thread.join()
    assert finished.code == 0, finished.output
    assert not refusals
    lines = finished.output.splitlines()
    down = next(line for line in lines if "can't be uploaded" in line)
    what = rf"checkpoint-\d can't be uploaded to {uri}: .+; training goes on, and so do the tries"
    assert re.fullmatch(what, down), down  # what is said of a connection depends on where it broke
    last = next(line for line in lines if line.startswith("checkpoint-6 is at"))
    assert lines.index(down) < lines.index(last)
    assert "The AWS Access Key Id you provided does not exist in our records." in finished.output
    local = content(tmp_path / "run" / "checkpoint-6")
    stored = {name for name in s3.names("bucket") if "/checkpoint-" in name}
    assert stored == {f"runs/first/checkpoint-6/{name}" for name in local}
    assert all(s3.read("bucket", f"runs/first/checkpoint-6/{name}") == text for name, text in local.items())
    assert [path.name for path in file_names.checkpoints(tmp_path / "run")] == ["checkpoint-6"]


def test_a_store_that_never_answers(
    s3: S3,  # noqa: F811
    sft: Sft,
    tiny_model: Path,
    text_data: Path,
    tmp_path: Path,
) -> None:
    """Training goes on to its end, and the exit code says that something is missing; the next run brings it."""
    uri, run, reason = "s3://bucket/run", tmp_path / "run", "The specified bucket does not exist"
    args = sft_args(tiny_model, text_data, run, *STEPS, "--checkpoint_uri", uri, "--upload_timeout", "2")
    finished = sft(*args)
    assert finished.code == 1
    assert f"{uri}: {reason}" in finished.output
    assert "training goes on, and checkpoints are uploaded once it answers" in finished.output
    assert f"error: checkpoint-6: {reason}, not uploaded to {uri}" in finished.output, finished.output
    assert "  fix: the same command with --resume_from_checkpoint true" in finished.output
    assert (run / "final" / "model.safetensors").exists()
    s3.make("bucket")
    again = sft(*args, "--resume_from_checkpoint", "true")
    assert again.code == 0, again.output
    local = {f"run/checkpoint-6/{name}" for name in content(run / "checkpoint-6")}
    assert {name for name in s3.names("bucket") if "/checkpoint-6/" in name} == local


def test_what_the_store_holds_is_not_trusted(
    s3: S3,  # noqa: F811
    sft: Sft,
    tiny_model: Path,
    text_data: Path,
    tmp_path: Path,
) -> None:
    """A bit of the newest one has flipped: the one before it is taken. A new run begins while the store is down."""
    uri, first = s3.make("bucket"), tmp_path / "first"
    args = (*STEPS[2:], "--save_total_limit", "2", "--checkpoint_uri", uri, "--resume_from_checkpoint")
    for steps in ("2", "4"):
        whole = sft(*sft_args(tiny_model, text_data, first, *args, "auto", "--max_steps", steps))
        assert whole.code == 0, whole.output
    part = "runs/first/checkpoint-4/model.safetensors"
    changed = bytearray(s3.read("bucket", part))
    changed[-1] ^= 1
    s3.write("bucket", part, bytes(changed))
    resumed = sft(*sft_args(tiny_model, text_data, tmp_path / "again", *args, "auto", "--max_steps", "6"))
    assert resumed.code == 0, resumed.output
    assert f"skipped: {uri}/checkpoint-4: model.safetensors has changed since it was written" in resumed.output
    assert "step 3/6" in resumed.output
    assert "step 2/6" not in resumed.output
    kept = s3.names("bucket")

    s3.stop()
    new = sft_args(tiny_model, text_data, tmp_path / "new", *args, "false", "--max_steps", "2", "--upload_timeout", "5")

    def come_back() -> None:
        while not (tmp_path / "new" / "checkpoint-2").exists():
            time.sleep(0.05)
        s3.start()

    thread = threading.Thread(target=come_back, daemon=True)
    thread.start()
    refused = sft(*new)
    thread.join()
    assert refused.code == 1
    assert f"error: checkpoint-2: it holds checkpoint-6 of another run, not uploaded to {uri}" in refused.output
    assert s3.names("bucket") == kept
    assert (tmp_path / "new" / "final" / "model.safetensors").exists()


FETCHING = """
import sys
from types import SimpleNamespace
from accelerate import PartialState
from accel_fsdp import disks
from accel_fsdp.errors import UserError
from accel_fsdp.training import resuming

def full(*args, **kwargs):
    raise UserError("the disk is too small", why="", fix="")

state = PartialState(cpu=True)
disks.check_room = full
asked = {"output_dir": sys.argv[2], "resume_from_checkpoint": "auto", "checkpoint_uri": sys.argv[1]}
ranks = {"process_index": state.process_index, "world_size": state.num_processes}
ranks |= {"save_on_each_node": False, "should_save": False}
try:
    resuming.newest(SimpleNamespace(**asked, **ranks))
except UserError as error:
    print(error.what, flush=True)
"""


def test_a_disk_too_small_for_the_stored_one_is_an_error_of_all_ranks(
    sft: Sft, tiny_model: Path, text_data: Path, tmp_path: Path
) -> None:
    """The first rank alone looks at the disk; the other must not wait for it."""
    uri = f"file://{tmp_path}/store/run"
    first = sft(*sft_args(tiny_model, text_data, tmp_path / "first", *STEPS, "--checkpoint_uri", uri))
    assert first.code == 0, first.output
    with socket.socket() as free:
        free.bind(("localhost", 0))
        where = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    command = [sys.executable, "-c", FETCHING, uri, str(tmp_path / "run")]
    ranks = [
        subprocess.Popen(
            command,
            env={**os.environ, **where, "RANK": rank, "LOCAL_RANK": rank, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    try:
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(output.endswith("the disk is too small\n") for output in outputs), outputs
