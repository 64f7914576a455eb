"""`--checkpoint_uri`: runs whose checkpoints are in an object store, which a real S3 server holds here.

In this process; `test_own_scripts.py` has the same of several ranks.
"""

import re
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Finished, here, run
from stores import KEYS, S3, s3  # noqa: F401  # a fixture

from accel_fsdp.checkpoints import Origin, completeness, file_names, marker
from accel_fsdp.training import stored

Trains = Callable[..., Finished]
STEPS = ("--max_steps", "6", "--save_steps", "2")


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in marker.files_in(folder)}


def test_a_run_goes_on_from_the_store_alone(s3: S3, trains: Trains, tmp_path: Path) -> None:  # noqa: F811
    """The first machine is lost with its disk after four steps; the second one has an empty disk."""
    uri, lost, straight, there = s3.make("bucket"), *(tmp_path / name for name in ("lost", "straight", "here"))
    trains(*STEPS, into="straight")
    flags = (*STEPS, "--checkpoint_uri", uri)
    first = trains(*flags, "--max_steps", "4", "--save_total_limit", "1", into="lost")
    assert re.search(rf"checkpoint-4 is at {uri}: [\d.]+ MB in", first.output)
    local = content(lost / "checkpoint-4")
    kept = {name: size for name, size in s3.names("bucket").items() if "/checkpoint-" in name}
    assert kept == {f"runs/first/checkpoint-4/{name}": len(text) for name, text in local.items()}
    assert all(s3.read("bucket", f"runs/first/checkpoint-4/{name}") == text for name, text in local.items())
    assert [path.name for path in file_names.checkpoints(lost)] == ["checkpoint-4"]

    for source, out in ((lost, tmp_path / "local"), (uri, tmp_path / "stored")):
        exported = here("export", source, out, "--verify", "bytes")
        assert exported.code == 0, exported.output
        shutil.rmtree(lost, ignore_errors=True)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("local", "stored")]
    assert weights[0] == weights[1]
    assert not list(tmp_path.glob(".fetched-*"))

    assert f"error: {uri} already holds a run" in trains(*flags, into="here", code=1).output
    s3.asked.clear()
    resumed = trains(*flags, "--resume_from_checkpoint", "auto", into="here")
    assert f"fetching checkpoint-4 from {uri}" in resumed.output
    assert content(there / "checkpoint-4") == local
    assert not [path for method, path in s3.asked if method == "PUT" and "checkpoint-4" in path]
    ends = [(run / "final" / "model.safetensors").read_bytes() for run in (straight, there)]
    assert ends[0] == ends[1]
    assert not list(there.glob(".*arriving"))
    assert "runs/first/checkpoint-6/complete.json" in s3.names("bucket")
    for output in (first.output, resumed.output, (there / "run.json").read_text()):
        assert KEYS["AWS_SECRET_ACCESS_KEY"] not in output


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tries again soon, here and in Amazon's library."""
    monkeypatch.setattr(stored, "PAUSE_SECONDS", 0.2)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")


def test_a_store_that_fails_delays_no_step(s3: S3, trains: Trains, tmp_path: Path) -> None:  # noqa: F811
    """It is slow, then busy, then down; a file is refused twice after it is up again."""
    uri, refusals = s3.make("bucket"), [*["SlowDown"] * 8, *["InvalidAccessKeyId"] * 2]
    s3.seconds = 0.05

    def refuses(method: str, path: str) -> str:
        is_late = len(refusals) <= 2
        return refusals.pop(0) if refusals and method == "PUT" and ("optimizer" in path or not is_late) else ""

    def fail() -> None:
        while not any(method == "PUT" for method, _ in s3.asked):
            time.sleep(0.05)
        s3.stop()
        time.sleep(1)
        s3.refuses = refuses
        s3.start()

    thread = threading.Thread(target=fail)
    thread.start()
    finished = trains(*STEPS, "--checkpoint_uri", uri, "--save_total_limit", "1")
    thread.join()
    assert not refusals
    lines = finished.output.splitlines()
    down = next(line for line in lines if "can't be uploaded" in line)
    what = rf"checkpoint-\d can't be uploaded to {uri}: .+; training continues, and so do the tries"
    assert re.fullmatch(what, down), down  # what is said of a connection depends on where it broke
    last = next(line for line in lines if line.startswith("checkpoint-6 is at"))
    assert lines.index(down) < lines.index(last)
    assert "The AWS Access Key Id you provided does not exist in our records." in finished.output
    local = content(tmp_path / "run" / "checkpoint-6")
    there = {name for name in s3.names("bucket") if "/checkpoint-" in name}
    assert there == {f"runs/first/checkpoint-6/{name}" for name in local}
    assert all(s3.read("bucket", f"runs/first/checkpoint-6/{name}") == text for name, text in local.items())
    assert [path.name for path in file_names.checkpoints(tmp_path / "run")] == ["checkpoint-6"]


def test_a_store_that_never_answers(s3: S3, trains: Trains, tmp_path: Path) -> None:  # noqa: F811
    """Training goes on to its end, and the exit code says that something is missing; the next run brings it."""
    uri, run, reason = "s3://bucket/run", tmp_path / "run", "The specified bucket does not exist"
    flags = (*STEPS, "--checkpoint_uri", uri, "--upload_timeout", "2")
    output = trains(*flags, code=1).output
    assert f"{uri}: {reason}" in output
    assert "training continues, and checkpoints are uploaded once it answers" in output
    assert f"error: checkpoint-6: {reason}, not uploaded to {uri}" in output
    assert "  fix: the same command with --resume_from_checkpoint true" in output
    assert (run / "final" / "model.safetensors").exists()
    s3.make("bucket")
    trains(*flags, "--resume_from_checkpoint", "true")
    local = {f"run/checkpoint-6/{name}" for name in content(run / "checkpoint-6")}
    assert {name for name in s3.names("bucket") if "/checkpoint-6/" in name} == local


def test_what_the_store_holds_is_not_trusted(s3: S3, trains: Trains, tmp_path: Path) -> None:  # noqa: F811
    """A bit of the newest one has flipped: the one before it is taken. A new run begins while the store is down."""
    uri = s3.make("bucket")
    flags = ("--save_steps", "2", "--save_total_limit", "2", "--checkpoint_uri", uri, "--resume_from_checkpoint")
    for steps in ("2", "4"):
        trains(*flags, "auto", "--max_steps", steps, into="first")
    part = "runs/first/checkpoint-4/model.safetensors"
    changed = bytearray(s3.read("bucket", part))
    changed[-1] ^= 1
    s3.write("bucket", part, bytes(changed))
    output = trains(*flags, "auto", "--max_steps", "6", into="again").output
    assert f"skipped: {uri}/checkpoint-4: model.safetensors has changed since it was written" in output
    assert "step 3/6" in output
    assert "step 2/6" not in output
    kept = s3.names("bucket")

    s3.stop()

    def come_back() -> None:
        while not (tmp_path / "new" / "checkpoint-2").exists():
            time.sleep(0.05)
        s3.start()

    thread = threading.Thread(target=come_back, daemon=True)
    thread.start()
    refused = trains(*flags, "false", "--max_steps", "2", "--upload_timeout", "5", into="new", code=1)
    thread.join()
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


def test_a_disk_too_small_for_the_stored_one_is_an_error_of_all_ranks(tmp_path: Path) -> None:
    """The first rank alone looks at the disk; the other must not wait for it."""
    folder, script = tmp_path / "store" / "run" / "checkpoint-2", tmp_path / "fetching.py"
    completeness.begin(folder)
    (folder / "trainer_state.json").write_text("{}")
    completeness.seal(folder, Origin("FSDP"))
    script.write_text(FETCHING)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    finished = run([*words, script, f"file://{folder.parent}", tmp_path / "run"])
    assert finished.code == 0, finished.output
    assert finished.output.count("the disk is too small\n") == 2
