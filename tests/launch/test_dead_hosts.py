"""A machine of two is switched off or unreachable: the other one says so and ends, and the job comes back."""

import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import hosts
import pytest
from conftest import ROOT, SFT, Finished, made_yaml
from reference import Reference, job_words, losses_of, train

from accel_fsdp.checkpoints import completeness
from accel_fsdp.errors import UserError
from accel_fsdp.training import arguments

pytestmark = pytest.mark.skipif(bool(hosts.missing()), reason=hosts.missing())
HANGING = ROOT / "tests" / "hanging.py"
STEPS, SAVED, PER_RANK, RANKS = 6, 2, 2, 4
FAULT_AFTER = 3
STARTED_SECONDS, ENDED_SECONDS = 90, 60
SILENCE_SECONDS = 15
OFF = "switched off or unreachable"
ELASTIC = {
    "PET_NNODES": "1:2",
    "PET_NPROC_PER_NODE": "2",
    "PET_MAX_RESTARTS": "3",
    "PET_RDZV_BACKEND": "c10d",
    "PET_RDZV_ENDPOINT": "n1:29455",
    "PET_RDZV_ID": "elastic",
    "PET_RDZV_CONF": "last_call_timeout=10",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}
"""What Kubeflow tells torchrun of an elastic job."""


@pytest.fixture
def machines() -> Iterator[list[hosts.Host]]:
    with hosts.network("n1", "n2") as machines:
        yield machines


@pytest.fixture(scope="module")
def reference(tiny_model: Path, text_data: Path) -> Reference:
    return train(tiny_model, text_data, steps=STEPS, global_batch=PER_RANK * RANKS)


class Job:
    """A job of two machines with two ranks each, one of which waits at a place for its machine's end."""

    def __init__(self, folder: Path, model: Path, data: Path, machines: Sequence[hosts.Host]) -> None:
        self.folder, self.run, self.machines = folder, folder / "run", machines
        self.yaml = folder / "job.yaml"
        place = {"num_processes": "4", "num_machines": "2", "main_process_ip": "n1"}
        self.yaml.write_text(made_yaml(model=str(model), mixed_precision="no", fsdp_version="2", **place))
        self.words = job_words(model, data, self.run, STEPS, PER_RANK, save_steps=SAVED)
        self.words += ["--hang_timeout", str(SILENCE_SECONDS)]

    def start(self, script: Path, *words: str, **environment: str) -> "list[subprocess.Popen[str]]":
        launch = ["-m", "accel_fsdp", "launch"]
        return [
            host.start([*launch, "--machine-rank", str(rank), self.yaml, script, *self.words, *words], **environment)
            for rank, host in enumerate(self.machines)
        ]

    def start_elastic(self, script: Path, *words: str, **environment: str) -> "list[subprocess.Popen[str]]":
        """As the hint for an elastic Kubeflow job says."""
        more = ["--accelerate_config", self.yaml, "--resume_from_checkpoint", "auto"]
        torchrun = ["-m", "torch.distributed.run", script, *self.words, *words, *more]
        return [host.start(torchrun, **ELASTIC, **environment) for host in self.machines]

    def start_until(self, kind: str, rank: int, step: int, elastic: bool = False) -> "list[subprocess.Popen[str]]":
        """Starts it, and returns when the rank waits."""
        note = self.folder / "note"
        fault = {"HANG": kind, "HANG_STEP": str(step), "HANG_RANK": str(rank), "HANG_NOTE": str(note)}
        started = (self.start_elastic if elastic else self.start)(HANGING, **fault)
        until = time.monotonic() + STARTED_SECONDS
        while not note.exists():
            assert time.monotonic() < until, [process.output for process in hosts.all_ended(started, 0.1)]
            assert all(process.poll() is None for process in started), [
                process.output for process in hosts.all_ended(started, 30)
            ]
            time.sleep(0.1)
        return started

    def comes_back(self, reference: Reference) -> None:
        """On the same two machines, started again, with the losses of a job that nothing happened to."""
        newest = completeness.choose(self.run).newest
        assert newest == self.run / f"checkpoint-{SAVED}"
        with hosts.network("n1", "n2") as self.machines:
            first, second = hosts.all_ended(self.start(SFT, "--resume_from_checkpoint", "auto"), STARTED_SECONDS)
        assert (first.code, second.code) == (0, 0), first.output + second.output
        assert losses_of(self.run, STEPS) == pytest.approx(reference.losses, abs=1e-4)


@pytest.fixture
def job(tmp_path: Path, tiny_model: Path, text_data: Path, machines: list[hosts.Host]) -> Job:
    return Job(tmp_path, tiny_model, text_data, machines)


def assert_says(ended: Finished, message: str) -> None:
    assert ended.code == 1, ended.output
    assert re.search(rf"error: (a collective failed: )?{message}", ended.output), ended.output
    assert f"checkpoint-{SAVED} is the newest complete checkpoint" in ended.output


@pytest.mark.slow
def test_a_host_switched_off_in_a_step(job: Job) -> None:
    """Its system closes the connections as it goes."""
    launchers = job.start_until("wait", rank=3, step=FAULT_AFTER)
    job.machines[1].cut_power()
    first, _ = hosts.all_ended(launchers, ENDED_SECONDS)
    assert_says(first, rf"no heartbeat of n2 \(ranks 2, 3\) for \d+ s; the machine doesn't answer either: {OFF}")


@pytest.mark.slow
def test_the_host_with_the_store_switched_off_in_a_save(job: Job, reference: Reference) -> None:
    launchers = job.start_until("save", rank=0, step=2 * SAVED)
    job.machines[0].cut_power()
    _, second = hosts.all_ended(launchers, ENDED_SECONDS)
    assert_says(second, r"no connection to n1 \(ranks 0, 1\), where the job's store is")
    job.comes_back(reference)


@pytest.mark.slow
def test_all_processes_of_a_host_are_killed(job: Job) -> None:
    """Its system runs on, and answers."""
    launchers = job.start_until("wait", rank=3, step=FAULT_AFTER)
    for process in hosts.processes_of(job.machines[1]):
        process.kill()
    first, _ = hosts.all_ended(launchers, ENDED_SECONDS)
    assert_says(
        first, r"no heartbeat of n2 \(ranks 2, 3\) for \d+ s; the machine itself answers: its processes have ended"
    )
    assert OFF not in first.output


@pytest.mark.slow
def test_a_link_is_cut(job: Job) -> None:
    """Nothing closes a connection, and each side misses the other."""
    launchers = job.start_until("wait", rank=3, step=FAULT_AFTER)
    job.machines[1].cut_link()
    first, second = hosts.all_ended(launchers, ENDED_SECONDS)
    assert_says(first, rf"no heartbeat of n2 \(ranks 2, 3\) for \d+ s; the machine doesn't answer either: {OFF}")
    assert_says(
        second,
        rf"no heartbeat of n1 \(ranks 0, 1\), where the job's store is, for \d+ s; the machine doesn't .*: {OFF}",
    )


@pytest.mark.slow
def test_an_elastic_job_goes_on_without_a_host(job: Job, reference: Reference) -> None:
    """On two ranks instead of four, with the same rows in each step."""
    launchers = job.start_until("wait", rank=3, step=FAULT_AFTER, elastic=True)
    job.machines[1].cut_power()
    first, _ = hosts.all_ended(launchers, STARTED_SECONDS)
    assert first.code == 0, first.output
    assert "elastic: 2 ranks instead of 4, so --gradient_accumulation_steps 2 instead of 1: steps of 8" in first.output
    assert re.search(r"no (heartbeat of|connection to) n2 \(ranks \d, \d\)", first.output), first.output
    assert losses_of(job.run, STEPS) == pytest.approx(reference.losses, abs=1e-4)


def test_a_mesh_of_other_ranks_than_there_are(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an elastic job of hybrid sharding would have after a loss."""
    yaml = tmp_path / "hybrid.yaml"
    yaml.write_text(made_yaml(model=str(tiny_model), num_processes="4", fsdp_version="2", strategy="4"))
    for name, value in {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", [str(SFT), "--accelerate_config", str(yaml), "--output_dir", str(tmp_path / "run")])
    with pytest.raises(UserError, match=r"lays out 4 ranks .*, and there are 2") as refused:
        arguments.parse()
    assert "hybrid sharding can't grow or shrink" in str(refused.value)
