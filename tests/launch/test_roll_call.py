"""`accel-fsdp launch` on machines that don't meet: each says what it saw, before any rank starts."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import hosts
import pytest
from conftest import Finished, made_yaml, run
from hosts import Host

from accel_fsdp.errors import UserError
from accel_fsdp.launch import Address, roll_call

pytestmark = pytest.mark.skipif(bool(hosts.missing()), reason=hosts.missing())
PORT, SECONDS = "29431", 90
WAIT, LONG = "12", "60"
"""Where one doesn't come, and where all do, each when it has started."""
SCRIPT = "from accel_fsdp import cpu\ncpu.enable()\nprint('a rank has started', flush=True)\ncpu.finish(0)\n"


@pytest.fixture(scope="module")
def machines() -> Iterator[list[Host]]:
    with hosts.network("n1", "n2", "n3") as found:
        yield found


class Launch:
    """The same job, started on some of the machines."""

    def __init__(self, folder: Path) -> None:
        self.yaml, self.script = folder / "job.yaml", folder / "own.py"
        self.yaml.write_text(made_yaml(model="llama-3.1-8b", num_processes="2", mixed_precision="no"))
        self.script.write_text(SCRIPT)

    def __call__(
        self, host: Host, rank: int, count: int = 2, at: str = "n1", wait: str = WAIT
    ) -> "subprocess.Popen[str]":
        place = ["--num-machines", str(count), "--num-processes", str(count), "--machine-rank", str(rank)]
        meeting = ["--main-process-ip", at, "--main-process-port", PORT, "--timeout", wait]
        return host.start(["-m", "accel_fsdp", "launch", *place, *meeting, self.yaml, self.script])


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    return Launch(tmp_path)


def all_refused(processes: Sequence["subprocess.Popen[str]"]) -> list[Finished]:
    ended = hosts.all_ended(processes, SECONDS)
    for one in ended:
        assert one.code == 1, one.output
        assert "a rank has started" not in one.output
        assert "is gone" not in one.output
    return ended


def test_machines_that_meet(machines: list[Host], launch: Launch) -> None:
    first, second = hosts.all_ended([launch(machines[0], 0, wait=LONG), launch(machines[1], 1, wait=LONG)], SECONDS)
    assert (first.code, second.code) == (0, 0), first.output + second.output
    assert "a rank has started" in first.output
    assert "a rank has started" in second.output


def test_machine_1_is_never_started(machines: list[Host], launch: Launch) -> None:
    (first,) = all_refused([launch(machines[0], 0)])
    assert "accel-fsdp: 1 of 2 machines connected; machine 1 is missing, 10 s\n" in first.output
    assert "error: 1 of 2 machines connected; machine 1 is missing, after 12 s" in first.output


def test_machine_0_is_never_started(machines: list[Host], launch: Launch) -> None:
    (second,) = all_refused([launch(machines[1], 1)])
    assert f"accel-fsdp: machine 0 at n1:{PORT} has not been reached for 10 s: Connection refused\n" in second.output
    assert f"error: machine 0 at n1:{PORT} has not been reached for 12 s: Connection refused" in second.output


def test_both_were_told_that_they_are_machine_1(machines: list[Host], launch: Launch) -> None:
    first, second = all_refused([launch(machines[0], 1), launch(machines[1], 1)])
    assert "n1 is this machine, which was told that it is machine 1" in first.output
    assert "this machine" not in second.output


def test_both_were_told_that_they_are_machine_0(machines: list[Host], launch: Launch) -> None:
    first, second = all_refused([launch(machines[0], 0), launch(machines[1], 0)])
    said = "two machines were told that they are machine 0: the one at n1, and n2"
    assert said in second.output or "this is machine 0, and it doesn't reach itself at n1" in second.output
    assert said in first.output or "machine 1 is missing" in first.output


def test_two_of_three_have_one_rank(machines: list[Host], launch: Launch) -> None:
    ended = all_refused([launch(host, min(number, 1), 3, wait=LONG) for number, host in enumerate(machines)])
    for one in ended:
        assert "error: two machines were told that they are machine 1: n" in one.output
        assert "n2 (process" in one.output
        assert "n3 (process" in one.output


def test_an_address_that_no_machine_has(machines: list[Host], launch: Launch) -> None:
    first, second = all_refused([launch(machines[0], 0, at="10.77.0.9"), launch(machines[1], 1, at="10.77.0.9")])
    assert f"this is machine 0, and it doesn't reach itself at 10.77.0.9:{PORT}" in first.output
    assert f"machine 0 at 10.77.0.9:{PORT} has not been reached for 1" in second.output


def test_a_port_that_is_dropped(machines: list[Host], launch: Launch) -> None:
    rule = ["ipproto", "tcp", "dport", PORT, "blackhole"]
    with hosts.changed(machines[1], ["ip", "rule", "add", *rule], ["ip", "rule", "del", *rule]):
        first, second = all_refused([launch(machines[0], 0), launch(machines[1], 1)])
    assert "machine 1 is missing" in first.output
    assert f"machine 0 at n1:{PORT} has not been reached for" in second.output


def test_machine_0_refuses_its_own_name(machines: list[Host], launch: Launch, tmp_path: Path) -> None:
    names = tmp_path / "hosts"
    names.write_text("127.0.0.1 localhost\n127.0.1.1 n1\n10.77.0.2 n2\n")
    with hosts.changed(machines[0], ["mount", "--bind", str(names), "/etc/hosts"], ["umount", "/etc/hosts"]):
        first, second = all_refused([launch(machines[0], 0), launch(machines[1], 1)])
    assert "n1 is 127.0.1.1 on this machine" in first.output
    assert f"machine 0 at n1:{PORT} has not been reached for 12 s: Connection refused" in second.output


def test_machines_that_were_told_other_numbers(machines: list[Host], launch: Launch) -> None:
    first, second = all_refused([launch(machines[0], 0, 2, wait=LONG), launch(machines[1], 1, 3, wait=LONG)])
    for one in (first, second):
        assert "error: num_machines is 2 on machine 0 (n1), and 3 on machine 1 (n2)" in one.output


def test_a_refusal_in_the_last_second_is_read() -> None:
    """One that comes while machine 0 waits for the last answers ends all; a later one ends its sender."""
    first, late = (roll_call.Attendee(rank, 2, 2, f"n{rank}", 7) for rank in (0, 1))
    board = Address("127.0.0.1", 0, hosts=True).open(10)
    board.put("complete/1", True)
    board.put(roll_call.REFUSED, ["two machines are one", "another rank"])
    with pytest.raises(UserError, match="two machines are one"):
        roll_call._part(board, first)
    board.remove(roll_call.REFUSED)
    roll_call._part(board, first)
    with pytest.raises(UserError, match="machine 1 came late"):
        roll_call._refuse(board, f"{late} came late".replace(" (n1)", ""))
    assert board.get(roll_call.REFUSED) == []


def test_a_time_that_cannot_be() -> None:
    refused = run([sys.executable, "-m", "accel_fsdp", "launch", "--timeout", "0", "job.yaml", "own.py"])
    assert refused.code == 2
    assert "error: --timeout 0" in refused.output
