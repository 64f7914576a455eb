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
from reference import Reference, job_words, losses_of, train

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


@pytest.fixture(scope="module")
def reference(tiny_model: Path, rows: Path) -> Reference:
    return train(tiny_model, rows, steps=STEPS, global_batch=PER_RANK * RANKS)


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


def saved(folder: Path, number: str, cluster: slurm.Cluster) -> None:
    """Goes on when the job has saved for the first time."""
    cluster.wait(number, lambda job: completeness.choose(folder / "run").newest is not None, SECONDS)


def ended_well(folder: Path, number: str, cluster: slurm.Cluster, restarts: int) -> None:
    """Goes on when the job is done, and has been started again so many times."""
    job = cluster.wait(number, lambda job: job["JobState"] in ENDED, SECONDS)
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("COMPLETED", "0:0", str(restarts)), (
        printed(folder) + cluster.logs()
    )


def waits_again(number: str, cluster: slurm.Cluster) -> None:
    """Goes on when the job is back in the queue, and could be started.

    slurmd refuses the start of a job that ended in the same second: "already killed".
    """
    cluster.wait(number, lambda job: (job["JobState"], job["Restarts"]) == ("PENDING", "1"), SECONDS)
    time.sleep(1.5)


def goes_on(folder: Path, number: str, cluster: slurm.Cluster, reference: Reference) -> None:
    """Without the two minutes that SLURM lets a requeued job wait."""
    cluster.says("scontrol", "update", f"JobId={number}", "StartTime=now")
    ended_well(folder, number, cluster, restarts=1)
    assert losses_of(folder / "run", STEPS) == pytest.approx(reference.losses, abs=1e-4)


def stopped_at(folder: Path, name: str) -> int:
    """The step after which the ranks ended of that signal."""
    steps = re.findall(rf"stopped: {name} after step (\d+)", printed(folder))
    assert len(steps) == 1, printed(folder)
    return int(steps[0])


@pytest.mark.slow
def test_a_job_on_two_machines_learns_as_one_process_does(
    cluster: slurm.Cluster, tiny_model: Path, rows: Path, reference: Reference, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    number = cluster.submit(job_file(tmp_path, tiny_model, rows, monkeypatch))
    ended_well(tmp_path, number, cluster, restarts=0)
    assert "FSDP2: 4 units, each rank holds 0.02 M of 0.06 M" in printed(tmp_path)
    assert losses_of(tmp_path / "run", STEPS) == pytest.approx(reference.losses, abs=1e-4)


@pytest.mark.slow
def test_a_job_that_is_warned_saves_queues_again_and_ends_as_if_it_was_not(
    cluster: slurm.Cluster, tiny_model: Path, rows: Path, reference: Reference, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    """SLURM signals ranks and launchers alike, as it does before the time is over; so none of them starts warm."""
    number = cluster.submit(job_file(tmp_path, tiny_model, rows, monkeypatch, every=2), COLD="1")
    saved(tmp_path, number, cluster)
    cluster.says("scancel", "--signal=USR1", number)
    waits_again(number, cluster)
    assert 2 <= stopped_at(tmp_path, "SIGUSR1") < STEPS
    assert set(re.findall(r"Exited with exit code (\d+)", printed(tmp_path))) <= {"75", "138"}
    goes_on(tmp_path, number, cluster, reference)


@pytest.mark.slow
def test_a_job_that_is_taken_off_its_machines_saves_and_goes_on(
    cluster: slurm.Cluster, tiny_model: Path, rows: Path, reference: Reference, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    number = cluster.submit(job_file(tmp_path, tiny_model, rows, monkeypatch, every=2))
    saved(tmp_path, number, cluster)
    cluster.says("scontrol", "requeue", number)
    waits_again(number, cluster)
    assert 2 <= stopped_at(tmp_path, "SIGTERM") < STEPS
    goes_on(tmp_path, number, cluster, reference)


def test_a_job_that_fails_ends_with_the_code_of_its_ranks(
    cluster: slurm.Cluster, tiny_model: Path, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    number = cluster.submit(job_file(tmp_path, tiny_model, tmp_path / "nowhere", monkeypatch))
    job = cluster.wait(number, lambda job: job["JobState"] in ENDED, SECONDS)
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("FAILED", "1:0", "0"), printed(tmp_path)
    assert "nowhere" in printed(tmp_path)
