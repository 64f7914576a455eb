"""`accel-fsdp launch` on machines that don't meet, or that were told different things: all say why, and none trains."""

import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import hosts
import pytest
from conftest import ROOT, Finished, made_yaml

from accel_fsdp.launch.agreement import MAY_DIFFER, difference

pytestmark = pytest.mark.skipif(bool(hosts.missing()), reason=hosts.missing())
PORT, SECONDS = "29431", 120
WAIT, LONG = "11", "90"
"""Where one doesn't come, and where all do, each when it has started."""
SCRIPT = "from accel_fsdp.ranks import cpu\ncpu.enable()\nprint('a rank has started', flush=True)\ncpu.finish(0)\n"


class Launch:
    """The job of a folder, started on machines of a rank each."""

    def __init__(self, folder: Path, machines: list[hosts.Host]) -> None:
        self.folder, self.machines = folder, machines

    def __call__(self, *ranks: int | None, count: int = 2, at: str = "n1", wait: str = WAIT) -> list[Finished]:
        """What it prints on each machine that has a rank."""
        machines = zip(self.machines, ranks, strict=False)
        started = [self.start(host, rank, count, at, wait) for host, rank in machines if rank is not None]
        return hosts.all_ended(started, SECONDS)

    def start(self, host: hosts.Host, rank: int, count: int, at: str, wait: str) -> "subprocess.Popen[str]":
        numbers = f"--num-machines {count} --num-processes {count} --machine-rank {rank}"
        meeting = f"{numbers} --main-process-ip {at} --main-process-port {PORT} --timeout {wait}"
        words = [*meeting.split(), self.folder / "job.yaml", self.folder / "own.py"]
        return host.start(["-m", "accel_fsdp", "launch", *words])


def with_other_numbers(launch: Launch) -> list[Finished]:
    started = [launch.start(launch.machines[rank], rank, 2 + rank, "n1", LONG) for rank in range(2)]
    return hosts.all_ended(started, SECONDS)


NOT_REACHED = f"machine 0 at n1:{PORT} has not been reached for "
TWICE_0 = r"two machines were started as machine 0: n1 \(process \d+\), and n2 |closed the connection"
TWICE_1 = r"error: two machines were started as machine 1: n2 \(process \d+\), and n3 \(process"
CASES: Mapping[str, tuple[Callable[[Launch], list[Finished]], list[list[str]]]] = {
    "machine 1 is never started": (
        lambda launch: launch(0),
        [
            [
                f"accel-fsdp: 1 of 2 machines connected; machine 1 is missing, 10 s; machine 0 waits at n1:{PORT}\n",
                "error: 1 of 2 machines connected; machine 1 is missing, after 11 s",
            ]
        ],
    ),
    "machine 0 is never started": (
        lambda launch: launch(None, 1),
        [[f"accel-fsdp: {NOT_REACHED}10 s: Connection refused\n", f"error: {NOT_REACHED}11 s: Connection refused"]],
    ),
    "both were told that they are machine 0": (
        lambda launch: launch(0, 0),
        [[f"{TWICE_0}|machine 1 is missing"], [TWICE_0]],
    ),
    "two of three have one rank": (lambda launch: launch(0, 1, 1, count=3, wait=LONG), [[TWICE_1]] * 3),
    "an address that no machine has": (
        lambda launch: launch(0, 1, at="10.77.0.9"),
        [
            [f"this is machine 0, and it doesn't reach itself at 10.77.0.9:{PORT}"],
            [f"machine 0 at 10.77.0.9:{PORT} has not been reached for 1"],
        ],
    ),
    "other numbers": (with_other_numbers, [[r"num_machines +2 +0 \(n1\)\n +3 +1 \(n2\)\n"]] * 2),
}
"""How a job is started, and what each of its machines says in turn."""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], list[Finished]]]:
    """What the machines of a case printed."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "job.yaml").write_text(made_yaml(model="llama-3.1-8b", num_processes="2", mixed_precision="no"))
    (folder / "own.py").write_text(SCRIPT)

    def runs(case: str) -> Callable[[list[hosts.Host]], list[Finished]]:
        return lambda machines: CASES[case][0](Launch(folder, machines))

    with hosts.at_once({case: runs(case) for case in CASES}, count=3, width=len(CASES)) as outcomes:
        yield outcomes


@pytest.mark.parametrize("case", CASES)
def test_machines_that_do_not_meet(case: str, ended: Callable[[str], list[Finished]]) -> None:
    for machine, messages in zip(ended(case), CASES[case][1], strict=True):
        assert machine.code == 1, machine.output
        assert "a rank has started" not in machine.output
        for message in messages:
            assert re.search(message, machine.output), machine.output


PLANTED: Mapping[str, tuple[str, str]] = {
    "--learning_rate": ("1e-3", "5e-2"),
    "--seed": ("42", "7"),
    "--packing": ("not set", "given"),
    "FSDP_RESHARD_AFTER_FORWARD": ("true", "false"),
    "ACCELERATE_MIXED_PRECISION": ("no", "bf16"),
    "NVIDIA_TF32_OVERRIDE": ("not set", "0"),
    "peft": (r"[\d.]+", "0.0.1"),
    "script": (r"\w+", r"\w+"),
}
"""What is other on the second machine, and the values that the table has."""


class Told:
    """What one machine is told of a job: by itself, only what may differ."""

    def __init__(self, folder: Path, rank: int) -> None:
        (folder := folder / f"n{rank + 1}").mkdir()
        self.folder, self.file, self.script = folder, folder / "job.yaml", folder / "own.py"
        self.file.write_text(made_yaml(model="gpt2", num_processes="2", num_machines="2", mixed_precision="no"))
        self.script.write_text(SCRIPT)
        meeting = f"--num-machines 2 --machine-rank {rank} --main-process-ip n1 --main-process-port {PORT}"
        own = f"--output_dir {folder} --run_name=on-n{rank} --data={folder}/rows --gpu {rank}"
        self.meeting, self.words = meeting.split(), f"{own} --learning_rate 1e-3 --seed 42".split()
        self.variables = {"TRITON_CACHE_DIR": str(folder), "GLOO_SOCKET_IFNAME": "eth0"} if rank else {}

    def other(self) -> None:
        text = self.file.read_text().replace("mixed_precision: 'no'", "mixed_precision: bf16")
        self.file.write_text(text.replace("reshard_after_forward: true", "reshard_after_forward: false"))
        self.script.write_text(f"{SCRIPT}\n")
        self.words[-4:] = ["--learning_rate", "5e-2", "--seed", "7", "--packing"]
        (info := self.folder / "peft-0.0.1.dist-info").mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: peft\nVersion: 0.0.1\n")
        self.variables |= {"NVIDIA_TF32_OVERRIDE": "0", "PYTHONPATH": f"{self.folder}:{ROOT}"}

    def start(self, host: hosts.Host) -> "subprocess.Popen[str]":
        words = [*self.meeting, self.file, self.script, *self.words]
        return host.start(["-m", "accel_fsdp", "launch", *words], **self.variables)


def test_what_differs_ends_the_job_on_all_machines_unless_it_may(tmp_path: Path) -> None:
    told = [Told(tmp_path, rank) for rank in range(2)]
    with hosts.network("n1", "n2") as machines:
        told[1].words[-3] = "5e-2"
        told[0].variables[MAY_DIFFER] = "learning-rate"
        allowed = hosts.all_ended([side.start(host) for side, host in zip(told, machines, strict=True)], SECONDS)
        told[0].variables.clear()
        told[1].other()
        refused = hosts.all_ended([side.start(host) for side, host in zip(told, machines, strict=True)], SECONDS)
    for machine in allowed:
        assert (machine.code, "a rank has started" in machine.output) == (0, True), machine.output
    for machine in refused:
        assert (machine.code, "a rank has started" in machine.output) == (1, False), machine.output
        for name, (first, second) in PLANTED.items():
            row = rf"^    {name} +{first} +0 \(n1\)\n +{second} +1 \(n2\)$"
            assert re.search(row, machine.output, re.MULTILINE), (name, machine.output)
        assert machine.output.count(" 1 (n2)\n") == len(PLANTED), machine.output


def test_one_setting_that_differs_is_enough() -> None:
    members = [(f"{rank} (n{rank})", {"--seed": "1", "rows": None, MAY_DIFFER: ""}) for rank in range(7)]
    assert difference(members) is None
    members[6][1].update({"--seed": "2", "rows": "8"})  # rows that one machine alone knows are not compared
    differs = difference(members)
    assert differs is not None
    assert [line.split() for line in differs.table[1:]] == [
        ["--seed", "1", "0", "(n0),", "1", "(n1),", "2", "(n2),", "3", "(n3)", "and", "2", "more"], ["2", "6", "(n6)"]
    ]  # fmt: skip
    members[3][1][MAY_DIFFER] = "rows, seed"
    assert difference(members) is None
