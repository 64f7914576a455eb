"""`accel-fsdp launch` on machines that don't meet: each says what it saw, before any rank starts."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import hosts
import pytest
from conftest import Finished, made_yaml, run
from hosts import Host

pytestmark = pytest.mark.skipif(bool(hosts.missing()), reason=hosts.missing())
PORT, SECONDS = "29431", 120
WAIT, LONG = "12", "90"
"""Where one doesn't come, and where all do, each when it has started."""
SCRIPT = "from accel_fsdp.ranks import cpu\ncpu.enable()\nprint('a rank has started', flush=True)\ncpu.finish(0)\n"


class Launch:
    """The job of a folder, started on some of the machines."""

    def __init__(self, folder: Path, machines: list[Host]) -> None:
        self.folder, self.machines = folder, machines

    def __call__(
        self, host: Host, rank: int, count: int = 2, at: str = "n1", wait: str = WAIT
    ) -> "subprocess.Popen[str]":
        place = ["--num-machines", str(count), "--num-processes", str(count), "--machine-rank", str(rank)]
        meeting = ["--main-process-ip", at, "--main-process-port", PORT, "--timeout", wait]
        job = [self.folder / "job.yaml", self.folder / "own.py"]
        return host.start(["-m", "accel_fsdp", "launch", *place, *meeting, *job])

    def ended(self, *ranks: int | None, count: int = 2, at: str = "n1", wait: str = WAIT) -> list[Finished]:
        """On each machine that has a rank, all with the same flags."""
        machines = zip(self.machines, ranks, strict=False)
        return hosts.all_ended(
            [self(host, rank, count, at, wait) for host, rank in machines if rank is not None], SECONDS
        )


def with_a_port_that_is_dropped(launch: Launch) -> list[Finished]:
    rule = ["ipproto", "tcp", "dport", PORT, "blackhole"]
    with hosts.changed(launch.machines[1], ["ip", "rule", "add", *rule], ["ip", "rule", "del", *rule]):
        return launch.ended(0, 1)


def with_a_name_of_its_own_alone(launch: Launch) -> list[Finished]:
    names = launch.folder / "hosts"
    names.write_text("127.0.0.1 localhost\n127.0.1.1 n1\n10.77.0.2 n2\n")
    change = ["mount", "--bind", str(names), "/etc/hosts"], ["umount", "/etc/hosts"]
    with hosts.changed(launch.machines[0], *change):
        return launch.ended(0, 1)


def with_other_numbers(launch: Launch) -> list[Finished]:
    first, second, _ = launch.machines
    return hosts.all_ended([launch(first, 0, 2, wait=LONG), launch(second, 1, 3, wait=LONG)], SECONDS)


NOT_REACHED = f"machine 0 at n1:{PORT} has not been reached for "
TWICE_0 = r"two machines were started as machine 0: n1 \(process \d+\), and n2 "
TWICE_1 = ["error: two machines were started as machine 1: n", r"n2 \(process", r"n3 \(process"]
OTHER_NUMBERS = r"num_machines +2 +0 \(n1\)\n +3 +1 \(n2\)\n"
CASES: Mapping[str, tuple[Callable[[Launch], list[Finished]], list[list[str]]]] = {
    "machine 1 is never started": (
        lambda launch: launch.ended(0),
        [
            [
                f"accel-fsdp: 1 of 2 machines connected; machine 1 is missing, 10 s; machine 0 waits at n1:{PORT}\n",
                "error: 1 of 2 machines connected; machine 1 is missing, after 12 s",
            ]
        ],
    ),
    "machine 0 is never started": (
        lambda launch: launch.ended(None, 1),
        [
            [
                f"accel-fsdp: {NOT_REACHED}10 s: Connection refused\n",
                f"error: {NOT_REACHED}12 s: Connection refused",
            ]
        ],
    ),
    "both were told that they are machine 1": (
        lambda launch: launch.ended(1, 1),
        [[f"{NOT_REACHED}12 s: Connection refused", "another address, port or rank"]] * 2,
    ),
    "both were told that they are machine 0": (
        lambda launch: launch.ended(0, 0),
        [
            [f"{TWICE_0}|machine 1 is missing"],
            [f"{TWICE_0}|this is machine 0, and it doesn't reach itself at n1"],
        ],
    ),
    "two of three have one rank": (lambda launch: launch.ended(0, 1, 1, count=3, wait=LONG), [TWICE_1] * 3),
    "an address that no machine has": (
        lambda launch: launch.ended(0, 1, at="10.77.0.9"),
        [
            [f"this is machine 0, and it doesn't reach itself at 10.77.0.9:{PORT}"],
            [f"machine 0 at 10.77.0.9:{PORT} has not been reached for 1"],
        ],
    ),
    "a port that is dropped": (with_a_port_that_is_dropped, [["machine 1 is missing"], [NOT_REACHED]]),
    "machine 0 refuses its own name": (
        with_a_name_of_its_own_alone,
        [["n1 is 127.0.1.1 on this machine"], [f"{NOT_REACHED}12 s: Connection refused"]],
    ),
    "other numbers": (with_other_numbers, [[OTHER_NUMBERS]] * 2),
}
"""How a job is started, and what each of its machines says in turn."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That of the job."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "job.yaml").write_text(made_yaml(model="llama-3.1-8b", num_processes="2", mixed_precision="no"))
    (folder / "own.py").write_text(SCRIPT)
    return folder


@pytest.fixture(scope="module")
def ended(folder: Path) -> Iterator[Callable[[str], list[Finished]]]:
    """What the machines of a case printed."""

    def runs(case: str) -> Callable[[list[Host]], list[Finished]]:
        return lambda machines: CASES[case][0](Launch(folder, machines))

    with hosts.at_once({case: runs(case) for case in CASES}, count=3, width=len(CASES)) as outcomes:
        yield outcomes


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("case", CASES)
def test_machines_that_do_not_meet(case: str, ended: Callable[[str], list[Finished]]) -> None:
    for machine, sayings in zip(ended(case), CASES[case][1], strict=True):
        assert machine.code == 1, machine.output
        assert "a rank has started" not in machine.output
        assert "is gone" not in machine.output
        for message in sayings:
            assert re.search(message, machine.output), machine.output


def test_machines_that_meet(folder: Path) -> None:
    with hosts.network("n1", "n2") as machines:
        finished = Launch(folder, machines).ended(0, 1, wait=LONG)
    assert [machine.code for machine in finished] == [0, 0], finished
    assert all("a rank has started" in machine.output for machine in finished)


def test_a_time_that_cannot_be() -> None:
    refused = run([sys.executable, "-m", "accel_fsdp", "launch", "--timeout", "0", "job.yaml", "own.py"])
    assert refused.code == 2
    assert "error: --timeout 0" in refused.output
