"""`accel-fsdp doctor` on several machines at once: each fault is named, and where it is."""

import contextlib
import functools
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import hosts
import psutil
import pytest
from conftest import ROOT, Finished, made_yaml
from hosts import Host, changed

pytestmark = pytest.mark.skipif(bool(hosts.missing()), reason=hosts.missing())
SECONDS = 110
PORT = "29431"


CASES: dict[str, Callable[[list[Host], Path], list[Finished]]] = {}
Ended = Callable[[str], list[Finished]]


def case(run: Callable[[list[Host], Path], list[Finished]]) -> None:
    """Has a case run beside the others, on three machines and with a folder of its own."""
    CASES[run.__name__] = run


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ended]:
    """What doctor printed on the machines of a case."""

    def runs(name: str) -> Callable[[list[Host]], list[Finished]]:
        folder = tmp_path_factory.mktemp(name)
        return lambda machines: CASES[name](machines, folder)

    with hosts.at_once({name: runs(name) for name in CASES}, count=3, width=6) as outcomes:
        yield outcomes


@pytest.fixture(scope="module")
def machines() -> Iterator[list[Host]]:
    """Those of measurements, which nothing of this file may disturb."""
    with hosts.network("n1", "n2", "n3") as machines:
        yield machines


def started(host: Host, rank: int, count: int, *words: str | Path, **environment: str) -> "subprocess.Popen[str]":
    place = ["--machine-rank", str(rank), "--num-machines", str(count), "--main-process-ip", "n1"]
    given = [*place, "--main-process-port", PORT, "--timeout", "30", *words]
    return host.start(["-m", "accel_fsdp", "doctor", *given], **environment)


def doctors(machines: Sequence[Host], *words: str | Path, **of_second: str) -> list[Finished]:
    """On each machine at the same time; `of_second` are variables of machine 1 alone."""
    count = len(machines)
    processes = [started(h, n, count, *words, **(of_second if n == 1 else {})) for n, h in enumerate(machines)]
    return hosts.all_ended(processes, SECONDS)


@case
def switched_off(machines: list[Host], folder: Path) -> list[Finished]:
    """The first to start, as it takes longest."""
    processes = [started(host, number, 3, "--num-processes", "3") for number, host in enumerate(machines)]
    while not is_tested(machines[2]) and processes[2].poll() is None:
        time.sleep(0.05)
    machines[2].cut_power()
    return hosts.all_ended(processes, SECONDS)


ENDS_AS_IT_JOINS = f"""
from accel_fsdp.launch import Address
store = Address("n1", {PORT}, hosts=False).open(30)
store.put("facts/2", store.wait(["facts/1"], 30)["facts/1"])
store.wait(["present"], 30)
store.put("sees/2", {{"mark": True, "ahead": 0.0}})
store.put("pairs/2/started", True)
store.put("pair/1-2/1/comes", True)
"""
"""A doctor that ends after it has told machine 1 that it comes to their test, and before it has connected to it."""


@case
def ends_as_it_joins(machines: list[Host], folder: Path) -> list[Finished]:
    doctors = [started(host, number, 3) for number, host in enumerate(machines[:2])]
    return hosts.all_ended([*doctors, machines[2].start(["-c", ENDS_AS_IT_JOINS])], SECONDS)


def is_tested(machine: Host) -> bool:
    """Whether its process of the tests has run long enough to tell the others that it is there."""
    for process in hosts.processes_of(machine):
        with contextlib.suppress(psutil.Error):
            if any("doctor.probing" in word for word in process.cmdline()) and time.time() > process.create_time() + 1:
                return True
    return False


@case
def one_does_not_come(machines: list[Host], folder: Path) -> list[Finished]:
    return hosts.all_ended([started(host, number, 3) for number, host in enumerate(machines[:2])], SECONDS)


@pytest.mark.slow
def test_a_machine_that_does_not_come(ended: Ended) -> None:
    first, second = ended("one_does_not_come")
    assert (first.code, second.code) == (1, 1)
    assert "error    machines       machine 2 has not connected" in first.output
    assert re.search(r"(ok|unknown) +machines 0 and 1 ", first.output), first.output


@case
def port_blocked(machines: list[Host], folder: Path) -> list[Finished]:
    rule = ["ipproto", "tcp", "dport", PORT, "blackhole"]
    with changed(machines[1], ["ip", "rule", "add", *rule], ["ip", "rule", "del", *rule]):
        return doctors(machines[:2], "--timeout", "10")


def test_a_blocked_port(ended: Ended) -> None:
    first, second = ended("port_blocked")
    assert (first.code, second.code) == (1, 1)
    assert "machine 1 has not connected" in first.output
    assert f"machine 0 at n1:{PORT} doesn't answer" in second.output


@case
def all_first(machines: list[Host], folder: Path) -> list[Finished]:
    return hosts.all_ended([started(host, 0, 2) for host in machines[:2]], SECONDS)


def test_machines_that_were_all_told_to_be_the_first(ended: Ended) -> None:
    results = ended("all_first")
    assert all(result.code == 1 for result in results)
    assert any("another machine 0 already runs at n1" in result.output for result in results)


@case
def interface_missing(machines: list[Host], folder: Path) -> list[Finished]:
    return doctors(machines[:2], GLOO_SOCKET_IFNAME="nope0")


def test_an_interface_that_one_machine_has_not(ended: Ended) -> None:
    first, _ = ended("interface_missing")
    assert first.code == 1
    after = first.output.partition("machine 1 (n2)")[2]
    assert "GLOO_SOCKET_IFNAME=nope0: this machine has no interface nope0" in after
    assert re.search(r"error +machines 0 and 1 +they can't reach each other", after)


@case
def black_hole(machines: list[Host], folder: Path) -> list[Finished]:
    with machines[1].black_hole(1300):
        return doctors(machines[:2])


def test_packets_of_full_size_are_dropped(ended: Ended) -> None:
    """An MTU black hole: whatever fits into one small packet passes."""
    first, _ = ended("black_hole")
    assert first.code == 1
    row = re.search(r"error +machines 0 and 1 +(.*)\n +why: (.*)\n +fix: (.*)", first.output)
    assert row, first.output
    assert row[1] == "messages of 1 KiB come back, and a message of 64 KiB didn't come back in 10 s"
    assert "a smaller MTU" in row[2]
    assert "skipped" not in first.output


@case
def interface_that_leads_nowhere(machines: list[Host], folder: Path) -> list[Finished]:
    return doctors(machines[:2], GLOO_SOCKET_IFNAME="lo")


def test_an_interface_that_leads_nowhere(ended: Ended) -> None:
    first, _ = ended("interface_that_leads_nowhere")
    assert first.code == 1
    assert "GLOO_SOCKET_IFNAME=lo: lo" in first.output
    assert "export GLOO_SOCKET_IFNAME=eth0" in first.output


def named_elsewhere(machines: list[Host], folder: Path, address: str) -> list[Finished]:
    names = folder / "hosts"
    names.write_text(f"127.0.0.1 localhost\n{address} n2\n10.77.0.1 n1\n")
    with changed(machines[1], ["mount", "--bind", str(names), "/etc/hosts"], ["umount", "/etc/hosts"]):
        return doctors(machines[:2], "--num-processes", "2")


ADDRESSES = ("127.0.1.1", "10.77.0.99")
CASES |= {address: functools.partial(named_elsewhere, address=address) for address in ADDRESSES}


@pytest.mark.parametrize("address", ADDRESSES)
def test_a_host_name_that_leads_elsewhere(address: str, ended: Ended) -> None:
    """An error where the machines can't reach each other, and a warning where they do all the same."""
    first, _ = ended(address)
    message = "its own alone" if address.startswith("127") else "an address that none of its interfaces has"
    row = re.search(rf"(error|warning) +host name +n2 is {re.escape(address)}, {message}", first.output)
    assert row, first.output
    communicated = "each collective gives the right result" in first.output
    assert (row[1], first.code) == (("warning", 0) if communicated else ("error", 1)), first.output
    assert "export GLOO_SOCKET_IFNAME=eth0" in first.output


@case
def address_of_a_flag(machines: list[Host], folder: Path) -> list[Finished]:
    yaml = folder / "job.yaml"
    yaml_text = made_yaml(model="llama-3.1-8b", num_processes="2", mixed_precision="no")
    yaml.write_text("".join(line for line in yaml_text.splitlines(True) if not line.startswith("num_")))
    return doctors(machines[:2], "--num-processes", "2", yaml)


def test_an_address_that_a_flag_gives(ended: Ended) -> None:
    first, _ = ended("address_of_a_flag")
    assert "AF401" not in first.output
    assert first.code == 0, first.output


@case
def told_differently(machines: list[Host], folder: Path) -> list[Finished]:
    """Machine 1 has another number of ranks, another YAML, variable and version."""
    (info := folder / "peft-0.21.1.dist-info").mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: peft\nVersion: 0.21.1\n")
    processes = []
    for number, resharding in enumerate(("true", "false")):
        file = folder / f"n{number}.yaml"
        yaml_text = made_yaml(model="llama-3.1-8b", num_processes="2", num_machines="2", main_process_ip="n1")
        file.write_text(re.sub("(fsdp_reshard_after_forward): .*", rf"\1: {resharding}", yaml_text))
        variables = {"NVIDIA_TF32_OVERRIDE": str(number)} | ({"PYTHONPATH": f"{folder}:{ROOT}"} if number else {})
        ranks = str(2 + 2 * number)
        processes.append(started(machines[number], number, 2, "--num-processes", ranks, file, **variables))
    return hosts.all_ended(processes, SECONDS)


DIFFERENCES = {
    "numbers": "num_processes: 2 on 1 machine \\(0\\); 4 on 1 machine \\(1\\)",
    "YAML": "error    job            fsdp_config.fsdp_reshard_after_forward: "
    "True on 1 machine \\(0\\); False on 1 machine \\(1\\)",
    "variable": r"error +variables +NVIDIA_TF32_OVERRIDE: 0 on 1 machine \(0\); 1 on",
    "version": r"error +versions +peft: 0\.21\.\d on 1 machine \(0\); 0\.21\.1 on 1 machine \(1\)",
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_machines_that_were_told_differently(name: str, ended: Ended) -> None:
    """What `accel-fsdp launch` would refuse, before a job."""
    first, _ = ended("told_differently")
    assert first.code == 1
    assert re.search(DIFFERENCES[name], first.output), first.output


PRIVATE = "hf_abcdefghijklmnopqrstuvwx"


@case
def report_for_others(machines: list[Host], folder: Path) -> list[Finished]:
    (secret := folder / "secret-project").mkdir()
    private = {"NCCL_TOPO_FILE": str(secret / "topo.xml"), "NCCL_DEBUG_FILE": PRIVATE}
    return doctors(machines[:2], "--report", "--folder", secret, **private)


@case
def json_for_programs(machines: list[Host], folder: Path) -> list[Finished]:
    return doctors(machines[:1], "--json", "--folder", folder)


def test_the_report_for_others_names_nobody(ended: Ended) -> None:
    first, _ = ended("report_for_others")
    assert "<machine 0>" in first.output
    for word in ("n1", "n2", "10.77.0.1", "10.77.0.2", "secret-project", PRIVATE[:6], str(Path.home())):
        assert not re.search(rf"(?<![\w.]){re.escape(word)}(?![\w.])", first.output), word
    assert json.loads(ended("json_for_programs")[0].output)["healthy"]


BURNERS = 8
BURN = "while True: pass"


@pytest.fixture
def busy() -> Iterator[None]:
    """Other programs want all CPUs several times."""
    started = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(BURNERS)]
    yield
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_machines_that_are_busy_are_not_ill(busy: None, machines: list[Host], tmp_path: Path) -> None:
    """Two ranks on each of three machines; the others say no more than that machine 0 has the report."""
    first, *others = doctors(machines, "--num-processes", "6", "--folder", tmp_path, "--timeout", "60")
    assert [other.code for other in (first, *others)] == [0, 0, 0], [first.output, others]
    assert not re.search(r"(error|warning) +machines? [\d ]", first.output), first.output
    for pair in ("0 and 1", "0 and 2", "1 and 2"):
        assert re.search(rf"(ok|unknown) +machines {pair} +[\d.]+ [GM]B/s, [\d,]+ us", first.output), first.output
    assert "6 ranks: each collective gives the right result" in first.output
    assert "machine 2 (n3)" in first.output
    assert all("machine 0 shows the whole report" in other.output for other in others)
    assert list(tmp_path.iterdir()) == []


def skip_if_busy(doctor: Finished) -> None:
    """Doctor judges no network between machines that other programs keep busy, as other tests may do here."""
    if "other programs keep the machines busy" in doctor.output:
        pytest.skip("this machine is too busy to measure a network")


def test_one_machine_is_slow(machines: list[Host]) -> None:
    limit = ["dev", "eth0", "root"]
    slow = ["tc", "qdisc", "add", *limit, "tbf", "rate", "200mbit", "burst", "256kbit", "latency", "400ms"]
    with changed(machines[2], slow, ["tc", "qdisc", "del", *limit]):
        first, *_ = doctors(machines, "--num-processes", "3")
    skip_if_busy(first)
    assert first.code == 1
    assert re.search(r"error +machine 2 +[\d.]+ MB/s to the others at best", first.output)
    assert re.search(r"ok +machines 0 and 1", first.output)


def shaped(host: Host, rate: str, burst: str, limit: str) -> contextlib.AbstractContextManager[None]:
    root = ["dev", "eth0", "root"]
    words = ["tbf", "rate", rate, "burst", burst, "limit", limit]
    return changed(host, ["tc", "qdisc", "add", *root, *words], ["tc", "qdisc", "del", *root])


def test_packets_are_lost(machines: list[Host]) -> None:
    """A queue of three packets, whose overflow is dropped."""
    with shaped(machines[1], "300mbit", "3kb", "4500"):
        first, _ = doctors(machines[:2])
    skip_if_busy(first)
    assert re.search(
        r"warning +machines 0 and 1 +[\d,]+ of [\d,]+ TCP segments \([\d.]+%\) were sent again", first.output
    )


@pytest.mark.slow
def test_a_link_that_is_very_slow(machines: list[Host]) -> None:
    """It is measured, and nothing hangs."""
    with shaped(machines[1], "4mbit", "256kb", "4mb"):
        first, _ = doctors(machines[:2])
    skip_if_busy(first)
    assert re.search(r"(warning|error) +machines 0 and 1 ", first.output), first.output
    assert "would hang" not in first.output
    assert "MTU" not in first.output


def test_a_machine_that_is_switched_off_while_it_is_tested(ended: Ended) -> None:
    first, second, _ = ended("switched_off")
    assert (first.code, second.code) == (1, 1)
    assert re.search(r"error +(machines +machine 2 has not connected|machine 2 |rank 2 )", first.output)


def test_a_machine_that_ends_as_it_joins_spoils_no_other_pair(ended: Ended) -> None:
    first, _, last = ended("ends_as_it_joins")
    assert last.code == 0, last.output
    assert re.search(r"error +machine 2 +none of the others reaches it, or it ended", first.output), first.output
    assert re.search(r"(ok|unknown) +machines 0 and 1 ", first.output), first.output
