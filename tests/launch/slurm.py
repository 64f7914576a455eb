"""A SLURM cluster of network hosts: munged and slurmctld on the first, a slurmd on each, all with files of their own.

What it takes, beside network hosts, are Debian's `slurm-wlm` and `munge`. The daemons are processes of the hosts, and
end with them.
"""

import contextlib
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import hosts
from conftest import ROOT, ended

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "scancel")
CPUS, GPUS = 8, 2
"""Of each machine, as SLURM is told: a job file asks for 4 cores for each GPU. The GPUs are device files of no use."""
READY_SECONDS, COMMAND_SECONDS, POLL_SECONDS = 20.0, 20.0, 0.2
CONFIG = """\
ClusterName=tests
SlurmctldHost={first}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
SchedulerParameters=batch_sched_delay=0,sched_min_interval=100000,sched_interval=1
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
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

    def job(self, number: str) -> dict[str, str]:
        """What SLURM says of it."""
        words = self.says("scontrol", "show", "--oneliner", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, number: str, until: Callable[[dict[str, str]], bool], seconds: float) -> dict[str, str]:
        """What SLURM says of a job once that holds."""
        deadline = time.monotonic() + seconds
        while not until(job := self.job(number)):
            assert time.monotonic() < deadline, f"{job}\n{self.logs()}"
            time.sleep(POLL_SECONDS)
        return job

    def logs(self) -> str:
        """The ends of what the daemons wrote."""
        return "\n".join(f"{path.name}:\n{path.read_text()[-1500:]}" for path in sorted(self.folder.glob("*.log")))


@contextlib.contextmanager
def cluster(*names: str) -> Iterator[Cluster]:
    """A cluster of machines of these names, with nodes that wait for jobs."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    folder.chmod(0o755)  # munged wants its socket where all can reach it
    try:
        with hosts.network(*names) as machines:
            _write(folder, machines)
            ready = Cluster(machines, folder)
            with _daemons(folder, machines):
                deadline = time.monotonic() + READY_SECONDS
                while ready.says("sinfo", "--noheader", "--format=%T %D") != f"idle {len(names)}":
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
