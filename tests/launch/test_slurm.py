"""The batch files of `accel-fsdp script slurm`, unedited, in a SLURM of two machines with two ranks each."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm
from _pytest.monkeypatch import MonkeyPatch
from conftest import CHAT_DATA, SFT, made_yaml
from reference import job_words, losses_of, train

from accel_fsdp import cli
from accel_fsdp.checkpoints import completeness

pytestmark = [pytest.mark.skipif(bool(slurm.missing()), reason=slurm.missing()), pytest.mark.timeout(900)]
STEPS, PER_RANK, RANKS = 24, 2, 4
SECONDS = 150.0
ENDED = frozenset({"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"})


@pytest.fixture(scope="module")
def cluster() -> Iterator[slurm.Cluster]:
    with slurm.cluster("n1", "n2") as machines:
        yield machines


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A row for each rank and step, so that no step's rows come again."""
    chats = [json.loads(line) for line in (CHAT_DATA / "train.jsonl").read_text().splitlines()]
    texts = [turn["content"] for chat in chats for turn in chat["messages"]][: STEPS * PER_RANK * RANKS]
    assert len(texts) == STEPS * PER_RANK * RANKS
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text[: 40 + 5 * (i % 11)]}) + "\n" for i, text in enumerate(texts)))
    return path


def job_file(folder: Path, model: Path, data: Path, monkeypatch: MonkeyPatch, every: int = STEPS) -> Path:
    """What the command writes for a run that saves every so many steps."""
    machines = {"num_processes": "4", "num_machines": "2", "main_process_ip": "n1"}
    (folder / "job.yaml").write_text(made_yaml(model=str(model), mixed_precision="no", **machines))
    words = job_words(model, data, folder / "run", STEPS, PER_RANK, save_steps=every)
    monkeypatch.chdir(folder)
    assert cli.call(["script", "slurm", "--time", "10", "-o", "job.sh", "job.yaml", str(SFT), *words]) == 0
    return folder / "job.sh"


def printed(folder: Path) -> str:
    """What the job and the launchers of its machines wrote."""
    return "\n".join(f"{path.name}:\n{path.read_text()}" for path in sorted(folder.glob("job-*")))


@pytest.mark.slow
def test_a_job_that_is_warned_saves_queues_again_and_learns_as_one_process_does(
    cluster: slurm.Cluster, tiny_model: Path, rows: Path, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    """SLURM signals ranks and launchers alike, as it does before the time is over."""
    number = cluster.submit(job_file(tmp_path, tiny_model, rows, monkeypatch, every=2))
    cluster.wait(number, lambda job: completeness.choose(tmp_path / "run").newest is not None, SECONDS)
    cluster.says("scancel", "--signal=USR1", number)
    cluster.wait(number, lambda job: (job["JobState"], job["Restarts"]) == ("PENDING", "1"), SECONDS)
    steps = re.findall(r"stopped: SIGUSR1 after step (\d+)", printed(tmp_path))
    assert [2 <= int(step) < STEPS for step in steps] == [True], printed(tmp_path)
    assert set(re.findall(r"Exited with exit code (\d+)", printed(tmp_path))) <= {"75", "138"}
    time.sleep(1.5)  # slurmd refuses the start of a job that ended in the same second: "already killed"
    cluster.says("scontrol", "update", f"JobId={number}", "StartTime=now")  # without SLURM's two minutes
    job = cluster.wait(number, lambda job: job["JobState"] in ENDED, SECONDS)
    told = printed(tmp_path) + cluster.logs()
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("COMPLETED", "0:0", "1"), told
    assert "FSDP2: 4 units, each rank holds 0.02 M of 0.06 M" in told
    reference = train(tiny_model, rows, steps=STEPS, global_batch=PER_RANK * RANKS)
    assert losses_of(tmp_path / "run", STEPS) == pytest.approx(reference.losses, abs=1e-4)


def test_a_job_that_fails_ends_with_the_code_of_its_ranks(
    cluster: slurm.Cluster, tiny_model: Path, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    number = cluster.submit(job_file(tmp_path, tiny_model, tmp_path / "nowhere", monkeypatch))
    job = cluster.wait(number, lambda job: job["JobState"] in ENDED, SECONDS)
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("FAILED", "1:0", "0"), printed(tmp_path)
    assert "nowhere" in printed(tmp_path)
