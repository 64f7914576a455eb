"""`accel-fsdp doctor` on several machines at once: each fault is named, and where it is."""

import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import hosts
import psutil
import pytest
from conftest import ROOT, Finished, made_yaml
from hosts import Host, changed

pytestmark = pytest.mark.skipif(bool(hosts.missing()), reason=hosts.missing())
SECONDS = 110
PORT = "29431"


@pytest.fixture(scope="module")
def machines() -> Iterator[list[Host]]:
    with hosts.network("n1", "n2", "n3") as found:
        yield found


def started(host: Host, rank: int, count: int, *words: str | Path, **environment: str) -> "subprocess.Popen[str]":
    place = ["--machine-rank", str(rank), "--num-machines", str(count), "--main-process-ip", "n1"]
    given = [*place, "--main-process-port", PORT, "--timeout", "10", *words]
    return host.start(["-m", "accel_fsdp", "doctor", *given], **environment)


def doctors(machines: Sequence[Host], *words: str | Path, **of_second: str) -> list[Finished]:
    """On each machine at the same time; `of_second` are variables of machine 1 alone."""
    count = len(machines)
    processes = [started(h, n, count, *words, **(of_second if n == 1 else {})) for n, h in enumerate(machines)]
    return hosts.all_ended(processes, SECONDS)


def test_machines_that_are_well(machines: list[Host], tmp_path: Path) -> None:
    """Two ranks on each of three machines; the others say no more than that machine 0 has the report."""
    first, *others = doctors(machines, "--num-processes", "6", "--folder", tmp_path, "--timeout", "40")
    assert [one.code for one in (first, *others)] == [0, 0, 0], [first.output, others]
    for pair in ("0 and 1", "0 and 2", "1 and 2"):
        assert re.search(rf"ok +machines {pair} +[\d.]+ [GM]B/s, [\d,]+ us", first.output)
    assert "6 ranks: each collective gives the right result" in first.output
    assert "machine 2 (n3)" in first.output
    assert all("machine 0 shows the whole report" in one.output for one in others)
    assert list(tmp_path.iterdir()) == []


def test_a_machine_that_does_not_come(machines: list[Host]) -> None:
    processes = [started(host, number, 3) for number, host in enumerate(machines[:2])]
    first, second = hosts.all_ended(processes, SECONDS)
    assert (first.code, second.code) == (1, 1)
    assert "error    machines       machine 2 didn't come" in first.output
    assert "ok       machines 0 and 1" in first.output


def test_an_interface_that_one_machine_has_not(machines: list[Host]) -> None:
    first, _ = doctors(machines[:2], GLOO_SOCKET_IFNAME="nope0")
    assert first.code == 1
    after = first.output.partition("machine 1 (n2)")[2]
    assert "GLOO_SOCKET_IFNAME=nope0: this machine has no interface nope0" in after
    assert re.search(r"error +machines 0 and 1 +they can't talk to each other", after)


def test_an_interface_that_leads_nowhere(machines: list[Host]) -> None:
    first, _ = doctors(machines[:2], GLOO_SOCKET_IFNAME="lo")
    assert first.code == 1
    assert "GLOO_SOCKET_IFNAME=lo: lo" in first.output
    assert "export GLOO_SOCKET_IFNAME=eth0" in first.output


@pytest.mark.parametrize("address", ["127.0.1.1", "10.77.0.99"])
def test_a_host_name_that_leads_elsewhere(address: str, machines: list[Host], tmp_path: Path) -> None:
    """An error where the machines can't talk, and a warning where they do all the same."""
    names = tmp_path / "hosts"
    names.write_text(f"127.0.0.1 localhost\n{address} n2\n10.77.0.1 n1\n")
    with changed(machines[1], ["mount", "--bind", str(names), "/etc/hosts"], ["umount", "/etc/hosts"]):
        first, _ = doctors(machines[:2], "--num-processes", "2")
    said = "its own alone" if address.startswith("127") else "an address that none of its interfaces has"
    row = re.search(rf"(error|warning) +host name +n2 is {re.escape(address)}, {said}", first.output)
    assert row, first.output
    talked = "each collective gives the right result" in first.output
    assert (row[1], first.code) == (("warning", 0) if talked else ("error", 1)), first.output
    assert "export GLOO_SOCKET_IFNAME=eth0" in first.output


BURNERS = 8
BURN = "while True: pass"


@pytest.fixture
def busy() -> Iterator[None]:
    """Other programs want all CPUs several times."""
    started = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(BURNERS)]
    yield
    for one in started:
        one.kill()
        one.wait()


def test_machines_that_are_busy_are_not_ill(busy: None, machines: list[Host], tmp_path: Path) -> None:
    first, *others = doctors(machines, "--num-processes", "6", "--folder", tmp_path, "--timeout", "60")
    assert [one.code for one in (first, *others)] == [0, 0, 0], [first.output, others]
    assert not re.search(r"(error|warning) +machines? [\d ]", first.output), first.output
    assert "6 ranks: each collective gives the right result" in first.output


def test_a_blocked_port(machines: list[Host]) -> None:
    rule = ["ipproto", "tcp", "dport", PORT, "blackhole"]
    with changed(machines[1], ["ip", "rule", "add", *rule], ["ip", "rule", "del", *rule]):
        first, second = doctors(machines[:2])
    assert (first.code, second.code) == (1, 1)
    assert "machine 1 didn't come" in first.output
    assert f"machine 0 at n1:{PORT} doesn't answer" in second.output


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


def test_packets_of_full_size_are_dropped(machines: list[Host]) -> None:
    """An MTU black hole: whatever fits into one small packet passes."""
    with machines[1].black_hole(1300):
        first, _ = doctors(machines[:2])
    assert first.code == 1
    row = re.search(r"error +machines 0 and 1 +(.*)\n +why: (.*)\n +fix: (.*)", first.output)
    assert row, first.output
    assert row[1] == "messages of 1 KiB come back, and a message of 64 KiB didn't come back in 10 s"
    assert "a smaller MTU" in row[2]
    assert "skipped" not in first.output


def shaped(host: Host, rate: str, burst: str, limit: str) -> contextlib.AbstractContextManager[None]:
    root = ["dev", "eth0", "root"]
    words = ["tbf", "rate", rate, "burst", burst, "limit", limit]
    return changed(host, ["tc", "qdisc", "add", *root, *words], ["tc", "qdisc", "del", *root])


def test_packets_are_lost(machines: list[Host]) -> None:
    """A queue of three packets, whose overflow is dropped."""
    with shaped(machines[1], "300mbit", "3kb", "4500"):
        first, _ = doctors(machines[:2])
    assert re.search(
        r"warning +machines 0 and 1 +[\d,]+ of [\d,]+ TCP segments \([\d.]+%\) were sent again", first.output
    )


def test_a_link_that_is_very_slow(machines: list[Host]) -> None:
    """It is measured, and nothing hangs."""
    with shaped(machines[1], "4mbit", "256kb", "4mb"):
        first, _ = doctors(machines[:2])
    skip_if_busy(first)
    assert re.search(r"(warning|error) +machines 0 and 1 ", first.output), first.output
    assert "would hang" not in first.output
    assert "MTU" not in first.output


def test_an_address_that_a_flag_gives(machines: list[Host], tmp_path: Path) -> None:
    yaml = tmp_path / "job.yaml"
    made = made_yaml(model="llama-3.1-8b", num_processes="2", mixed_precision="no")
    yaml.write_text("".join(line for line in made.splitlines(True) if not line.startswith("num_")))
    first, _ = doctors(machines[:2], "--num-processes", "2", yaml)
    assert "AF401" not in first.output
    assert first.code == 0, first.output


def test_machines_that_were_told_other_numbers(machines: list[Host]) -> None:
    numbers = ("2", "4")
    processes = [started(machines[n], n, 2, "--num-processes", numbers[n]) for n in range(2)]
    first, _ = hosts.all_ended(processes, SECONDS)
    assert first.code == 1
    assert "num_processes: 2 on 1 machine (0); 4 on 1 machine (1)" in first.output


def test_machines_with_other_yamls_and_variables_that_change_results(machines: list[Host], tmp_path: Path) -> None:
    """What `accel-fsdp launch` would refuse, before a job."""
    processes = []
    for number, resharding in enumerate(("true", "false")):
        file = tmp_path / f"n{number}.yaml"
        made = made_yaml(model="llama-3.1-8b", num_processes="2", num_machines="2", main_process_ip="n1")
        file.write_text(re.sub("(fsdp_reshard_after_forward): .*", rf"\1: {resharding}", made))
        processes.append(started(machines[number], number, 2, file, NVIDIA_TF32_OVERRIDE=str(number)))
    first, _ = hosts.all_ended(processes, SECONDS)
    assert first.code == 1
    resharding = "fsdp_config.fsdp_reshard_after_forward: True on 1 machine (0); False on 1 machine (1)"
    assert f"error    job            {resharding}" in first.output, first.output
    assert re.search(r"error +variables +NVIDIA_TF32_OVERRIDE: 0 on 1 machine \(0\); 1 on", first.output)


def test_machines_that_were_all_told_to_be_the_first(machines: list[Host]) -> None:
    processes = [started(host, 0, 2) for host in machines[:2]]
    found = hosts.all_ended(processes, SECONDS)
    assert all(one.code == 1 for one in found)
    assert any("another one is so already at n1" in one.output for one in found)


def test_other_versions_on_one_machine(machines: list[Host], tmp_path: Path) -> None:
    info = tmp_path / "peft-0.21.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: peft\nVersion: 0.21.1\n")
    first, _ = doctors(machines[:2], PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert first.code == 1
    wanted = r"error +versions +peft: 0\.21\.\d on 1 machine \(0\); 0\.21\.1 on 1 machine \(1\)"
    assert re.search(wanted, first.output)


def test_the_report_for_others_names_nobody(machines: list[Host], tmp_path: Path) -> None:
    folder = tmp_path / "secret-project"
    folder.mkdir()
    private = {"NCCL_TOPO_FILE": str(folder / "topo.xml"), "NCCL_DEBUG_FILE": "hf_abcdefghijklmnopqrstuvwx"}
    first, _ = doctors(machines[:2], "--report", "--folder", folder, **private)
    assert "<machine 0>" in first.output
    for word in ("n1", "n2", "10.77.0.1", "10.77.0.2", "secret-project", "hf_abc", str(Path.home())):
        assert not re.search(rf"(?<![\w.]){re.escape(word)}(?![\w.])", first.output), word
    assert json.loads(doctors(machines[:1], "--json", "--folder", folder)[0].output)["healthy"]


def words_of(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


def test_a_machine_that_is_switched_off_while_it_is_tested(machines: list[Host]) -> None:
    """Last, as it stays off."""
    processes = [started(host, number, 3, "--num-processes", "3") for number, host in enumerate(machines)]
    while not any("doctor.probing" in word for one in hosts.processes_of(machines[2]) for word in words_of(one)):
        time.sleep(0.05)
    machines[2].cut_power()
    first, second, _ = hosts.all_ended(processes, SECONDS)
    assert (first.code, second.code) == (1, 1)
    assert re.search(r"error +(machines +machine 2 didn't come|machine 2 |rank 2 )", first.output)
