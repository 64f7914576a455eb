"""A rank of two machines sleeps or is killed, or a machine is switched off: the job ends on all, and comes back."""

import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import hosts
import pytest
from conftest import ROOT, SFT, Finished, made_yaml
from reference import Reference, job_words, losses_of, train

from accel_fsdp.errors import UserError
from accel_fsdp.training import arguments

pytestmark = pytest.mark.skipif(bool(hosts.missing()), reason=hosts.missing())
HANGING = ROOT / "tests" / "hanging.py"
STEPS, SAVED, PER_RANK, RANKS = 6, 2, 2, 4
FAULT_AFTER = 3
STARTED_SECONDS, ENDED_SECONDS = 90, 60
HANG_SECONDS = 15
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

    def start(self, script: Path, *words: str, **environment: str) -> "list[subprocess.Popen[str]]":
        launch = ["-m", "accel_fsdp", "launch", "--hang-timeout", str(HANG_SECONDS)]
        return [
            host.start([*launch, "--machine-rank", str(rank), self.yaml, script, *self.words, *words], **environment)
            for rank, host in enumerate(self.machines)
        ]

    def start_elastic(self, script: Path, *words: str, **environment: str) -> "list[subprocess.Popen[str]]":
        """As the hint for an elastic Kubeflow job says."""
        more = ["--accelerate_config", self.yaml, "--resume_from_checkpoint", "auto", "--hang_timeout", HANG_SECONDS]
        torchrun = ["-m", "torch.distributed.run", script, *self.words, *words, *map(str, more)]
        return [host.start(torchrun, **ELASTIC, **environment) for host in self.machines]

    def start_until(self, kind: str, rank: int, step: int, elastic: bool = False) -> "list[subprocess.Popen[str]]":
        """Starts it, and returns when the rank waits."""
        note = self.folder / "note"
        fault = {"HANG": kind, "HANG_STEP": str(step), "HANG_RANK": str(rank), "HANG_NOTE": str(note)}
        started = (self.start_elastic if elastic else self.start)(HANGING, **fault)
        until = time.monotonic() + STARTED_SECONDS
        while not note.exists():
            assert time.monotonic() < until, [process.output for process in hosts.all_ended(started, 0.1)]
            if any(process.poll() is not None for process in started):
                pytest.fail(str([process.output for process in hosts.all_ended(started, 30)]))
            time.sleep(0.1)
        return started


@pytest.fixture
def job(tmp_path: Path, tiny_model: Path, text_data: Path, machines: list[hosts.Host]) -> Job:
    return Job(tmp_path, tiny_model, text_data, machines)


def says_where(ended: Finished, *ranks: int) -> None:
    """The job has failed, and the last lines name the place of each rank of the machine."""
    assert ended.code == 1, ended.output
    said = ended.output[ended.output.index("where the ranks of this machine were") :]
    for rank in ranks:
        assert re.search(rf"^  rank {rank}: (\w+, )?/\S+\.py:\d+ in \w+$", said, re.MULTILINE), ended.output


def test_a_rank_that_sleeps_ends_the_job_on_all_machines(job: Job) -> None:
    first, second = hosts.all_ended(job.start_until("wait", rank=3, step=FAULT_AFTER), ENDED_SECONDS)
    says_where(first, 0, 1)
    says_where(second, 2, 3)
    assert re.search(r"  rank 3: \S+/hanging\.py:\d+ in wait$", second.output, re.MULTILINE), second.output


@pytest.mark.slow
def test_a_killed_rank_ends_the_job_on_all_machines(job: Job) -> None:
    first, second = hosts.all_ended(job.start_until("kill", rank=3, step=FAULT_AFTER), ENDED_SECONDS)
    says_where(first, 0, 1)
    assert "accel-fsdp: rank 3 ended with exit code " in second.output  # of SIGKILL, or of the stub of a warm start
    assert "  rank 3: wrote none\n" in second.output
    assert re.search(r"  rank 2: (\w+, )?/\S+\.py:\d+ in \w+$", second.output, re.MULTILINE), second.output


@pytest.mark.slow
def test_a_host_switched_off_in_a_step(job: Job) -> None:
    """Its system closes no connection, and nothing comes."""
    launchers = job.start_until("wait", rank=3, step=FAULT_AFTER)
    job.machines[1].cut_power()
    first, _ = hosts.all_ended(launchers, ENDED_SECONDS)
    says_where(first, 0, 1)


@pytest.mark.slow
def test_an_elastic_job_goes_on_without_a_host(job: Job, reference: Reference) -> None:
    """On two ranks instead of four, with the same rows in each step."""
    launchers = job.start_until("wait", rank=3, step=FAULT_AFTER, elastic=True)
    job.machines[1].cut_power()
    first, _ = hosts.all_ended(launchers, STARTED_SECONDS)
    assert first.code == 0, first.output
    assert "elastic: 2 ranks instead of 4, so --gradient_accumulation_steps 2 instead of 1: steps of 8" in first.output
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
