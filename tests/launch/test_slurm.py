"""The batch files of `accel-fsdp script slurm`, unedited, in a SLURM of two machines with two ranks each.

The cluster is one of network hosts: munged and slurmctld on the first, a slurmd on each, all with files of their own.
It takes Debian's `slurm-wlm` and `munge`. The daemons are processes of the hosts, and end with them.
"""

import contextlib
import os
import re
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import hosts
import pytest
from _pytest.monkeypatch import MonkeyPatch
from conftest import ROOT, SFT, ended, made_yaml
from reference import job_words, losses_of, train

from accel_fsdp import cli
from accel_fsdp.checkpoints import completeness

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "scancel")
CPUS, GPUS = 8, 2
"""Of each machine, as SLURM is told: a job file asks for 4 cores for each GPU. The GPUs are device files of no use."""
READY_SECONDS, COMMAND_SECONDS, POLL_SECONDS = 20.0, 20.0, 0.2
CONFIG = """\
ClusterName=tests
SlurmctldHost={first}
SlurmUser=root
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_min_interval=100000,sched_interval=1
ReturnToService=2
GresTypes=gpu
NodeName={names} CPUs={cpus} RealMemory=4000 Gres=gpu:{gpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Why there can be no cluster here; empty where there can."""
    if lacking := [name for name in NEEDED if shutil.which(name) is None]:
        return f"no {', '.join(lacking)}: Debian's slurm-wlm and munge"
    return hosts.missing()


class Cluster:
    """Commands run on its first machine."""

    def __init__(self, machines: Sequence[hosts.Host], folder: Path) -> None:
        self.machines, self.folder = machines, folder
        path = f"{folder / 'bin'}:{os.environ['PATH']}"
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf"), "PYTHONPATH": str(ROOT), "PATH": path}

    def says(self, *words: str | Path) -> str:
        """What one of SLURM's commands prints."""
        started = self.machines[0].run(words, **self.environment)
        done = ended(started, COMMAND_SECONDS)
        assert done.code == 0, f"{words}: {done.output}\n{self.logs()}"
        return done.output.strip()

    def submit(self, file: Path) -> str:
        """The number of the job that a file became, in whose folder it runs."""
        return self.says("sbatch", "--parsable", f"--chdir={file.parent}", file)

    def wait(self, number: str, until: Callable[[dict[str, str]], bool]) -> dict[str, str]:
        """What SLURM says of a job once that holds."""
        deadline = time.monotonic() + SECONDS
        while True:
            words = self.says("scontrol", "show", "--oneliner", "job", number).split()
            job = dict(word.split("=", 1) for word in words if "=" in word)
            if until(job):
                return job
            assert time.monotonic() < deadline, f"{job}\n{self.logs()}"
            time.sleep(POLL_SECONDS)

    def logs(self) -> str:
        """The ends of what the daemons wrote."""
        return "\n".join(f"{path.name}:\n{path.read_text()[-1500:]}" for path in sorted(self.folder.glob("*.log")))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two machines with nodes that wait for jobs."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    folder.chmod(0o755)  # munged wants its socket where all can reach it
    try:
        with hosts.network("n1", "n2") as machines:
            _write(folder, machines)
            ready = Cluster(machines, folder)
            with _daemons(folder, machines):
                deadline = time.monotonic() + READY_SECONDS
                while ready.says("sinfo", "--noheader", "--format=%T %D") != "idle 2":
                    assert time.monotonic() < deadline, ready.logs()
                    time.sleep(POLL_SECONDS)
                yield ready
    finally:
        shutil.rmtree(folder)


def _write(folder: Path, machines: Sequence[hosts.Host]) -> None:
    for name in ("bin", "state"):
        (folder / name).mkdir()
    names = ",".join(machine.name for machine in machines)
    text = CONFIG.format(first=machines[0].name, folder=folder, names=names, cpus=CPUS, gpus=GPUS)
    (folder / "slurm.conf").write_text(text)
    for number in range(GPUS):
        os.mknod(folder / f"gpu{number}", stat.S_IFCHR | 0o666, os.stat("/dev/null").st_rdev)
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-{GPUS - 1}]\n")
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    (folder / "bin" / "accel-fsdp").write_text(f'#!/bin/bash\nexec {sys.executable} -m accel_fsdp "$@"\n')
    (folder / "bin" / "accel-fsdp").chmod(0o755)


@contextlib.contextmanager
def _daemons(folder: Path, machines: Sequence[hosts.Host]) -> Iterator[None]:
    first = machines[0]
    files = {"key-file": "munge.key", "log-file": "munge.log", "pid-file": "munge.pid", "seed-file": "munge.seed"}
    words = [f"--{flag}={folder}/{name}" for flag, name in {**files, "socket": "munge.socket"}.items()]
    started = [
        first.run(["munged", "--foreground", "--force", *words]),
        first.run(["slurmctld", "-D", "-f", folder / "slurm.conf"]),
        *(machine.run(["slurmd", "-D", "-f", folder / "slurm.conf"]) for machine in machines),
    ]
    try:
        yield
    finally:
        for daemon in started:
            ended(daemon, seconds=0)


pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing()), pytest.mark.timeout(900), pytest.mark.slow]
STEPS, PER_RANK, RANKS = 24, 2, 4
SECONDS = 150.0
ENDED = frozenset({"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"})


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


def test_a_job_that_is_warned_saves_queues_again_and_learns_as_one_process_does(
    cluster: Cluster, tiny_model: Path, text_data: Path, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    """SLURM signals ranks and launchers alike, as it does before the time is over."""
    number = cluster.submit(job_file(tmp_path, tiny_model, text_data, monkeypatch, every=2))
    cluster.wait(number, lambda job: completeness.choose(tmp_path / "run").newest is not None)
    cluster.says("scancel", "--signal=USR1", number)
    cluster.wait(number, lambda job: (job["JobState"], job["Restarts"]) == ("PENDING", "1"))
    steps = re.findall(r"stopped: SIGUSR1 after step (\d+)", printed(tmp_path))
    assert [2 <= int(step) < STEPS for step in steps] == [True], printed(tmp_path)
    assert set(re.findall(r"Exited with exit code (\d+)", printed(tmp_path))) <= {"75", "138"}
    time.sleep(1.5)  # slurmd refuses the start of a job that ended in the same second: "already killed"
    cluster.says("scontrol", "update", f"JobId={number}", "StartTime=now")  # without SLURM's two minutes
    job = cluster.wait(number, lambda job: job["JobState"] in ENDED)
    told = printed(tmp_path) + cluster.logs()
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("COMPLETED", "0:0", "1"), told
    assert "FSDP2: 4 units, each rank holds 0.02 M of 0.06 M" in told
    reference = train(tiny_model, text_data, steps=STEPS, global_batch=PER_RANK * RANKS)
    assert losses_of(tmp_path / "run", STEPS) == pytest.approx(reference.losses, abs=1e-4)


def test_a_job_that_fails_ends_with_the_code_of_its_ranks(
    cluster: Cluster, tiny_model: Path, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    number = cluster.submit(job_file(tmp_path, tiny_model, tmp_path / "nowhere", monkeypatch))
    job = cluster.wait(number, lambda job: job["JobState"] in ENDED)
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("FAILED", "1:0", "0"), printed(tmp_path)
    assert "nowhere" in printed(tmp_path)
