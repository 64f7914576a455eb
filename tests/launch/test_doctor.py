"""`accel-fsdp doctor` on one machine: what it looks at, and what it says of real errors."""

import json
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import ROOT, Finished, made_yaml, run

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
MOUNTS = subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode == 0
FULL = 'mount -t tmpfs -o size=1m tmpfs /dev/shm; head -c 2000000 /dev/zero > /dev/shm/left; exec "$@"'


def doctor(*words: object, **environment: str) -> Finished:
    return run([sys.executable, "-m", "accel_fsdp", "doctor", *map(str, words)], **environment)


def with_full_shared_memory(*words: str | Path) -> Finished:
    return run(["unshare", "--mount", "bash", "-c", FULL, "bash", *words])


def test_a_healthy_machine() -> None:
    finished = doctor()
    assert finished.code == 0, finished.output
    for subject in ("system", "libraries", "GPUs", "memory", "/dev/shm", "limits", "disk", "host name", "interfaces"):
        assert re.search(rf"^  (ok|warning) +{subject} ", finished.output, flags=re.MULTILINE), subject
    assert "healthy" in finished.output


def test_ranks_of_one_machine_are_measured() -> None:
    report = json.loads(doctor("--json", "--num-processes", 2).output)
    assert report["healthy"]
    kinds = {(collective["collective"], collective["size_bytes"]) for collective in report["collectives"]}
    assert len(kinds) == len(report["collectives"]) == 12
    assert {"all_reduce", "all_gather", "reduce_scatter", "broadcast"} == {kind for kind, _ in kinds}
    assert all(collective["seconds"] > 0 and collective["bytes_per_second"] > 0 for collective in report["collectives"])


def test_what_a_yaml_asks_for_and_this_machine_has_not(tmp_path: Path) -> None:
    yaml = tmp_path / "job.yaml"
    yaml.write_text(made_yaml(model="llama-3.1-8b", num_processes="2").replace("fsdp_version", "fsdp_versoin"))
    finished = doctor(yaml)
    assert finished.code == 1
    assert re.search(r"error +AF\d{3} .*fsdp_versoin", finished.output)


@pytest.mark.skipif(not MOUNTS, reason="mounts of its own are not allowed")
def test_full_shared_memory() -> None:
    finished = with_full_shared_memory(sys.executable, "-m", "accel_fsdp", "doctor")
    assert finished.code == 1
    assert re.search(r"error +/dev/shm +0\.0 MiB free of 1\.0 MiB", finished.output)


def test_an_interface_that_is_not_there() -> None:
    finished = doctor(NCCL_SOCKET_IFNAME="ib7")
    assert finished.code == 1
    assert "NCCL_SOCKET_IFNAME=ib7: this machine has no interface ib7" in finished.output


def test_variables_that_slow_a_job_down() -> None:
    finished = doctor(CUDA_LAUNCH_BLOCKING="1")
    assert finished.code == 0
    assert "CUDA_LAUNCH_BLOCKING=1" in finished.output
    assert "unset CUDA_LAUNCH_BLOCKING" in finished.output


def test_a_full_disk(tmp_path: Path) -> None:
    if not MOUNTS:
        pytest.skip("mounts of its own are not allowed")
    small = f'mount -t tmpfs -o size=1m tmpfs {tmp_path}; exec "$@"'
    words = [sys.executable, "-m", "accel_fsdp", "doctor", "--folder", tmp_path / "runs" / "first"]
    finished = run(["unshare", "--mount", "bash", "-c", small, "bash", *words])
    assert finished.code == 1
    assert re.search(r"error +disk +No space left on device on tmpfs", finished.output)
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_another_launcher_started(tmp_path: Path) -> None:
    """Under torchrun one process of the machine speaks."""
    words = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "-m", "accel_fsdp", "doctor", "--folder", tmp_path]
    finished = run(words)
    assert finished.code == 0, finished.output
    assert finished.output.count("2 ranks: each collective gives the right result") == 1


def test_a_launcher_that_does_not_see_the_other_machines(tmp_path: Path) -> None:
    """Accelerate's, which starts one process alone in each pod of Kubeflow."""
    words = ["--cpu", "--num_processes", "1", "--module", "accel_fsdp", "doctor", "--folder", str(tmp_path)]
    pod = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "localhost"}
    finished = run([sys.executable, "-m", "accelerate.commands.launch", *words], **pod)
    assert finished.code != 0
    assert "PET_NNODES says num_machines 2, and the launcher started 1" in finished.output


def test_a_broken_yaml_is_one_row_of_many(tmp_path: Path) -> None:
    report = json.loads(run([sys.executable, "-m", "accel_fsdp", "doctor", "--json", str(tmp_path / "none")]).output)
    assert not report["healthy"]
    assert [row["subject"] for row in report["rows"] if row["verdict"] == "error"] == ["YAML"]
    assert any(row["subject"] == "disk" for row in report["rows"])


@pytest.mark.parametrize("flags", [("--num-machines", "0"), ("--timeout", "0"), ("--main-process-port", "99999")])
def test_numbers_that_cannot_be(flags: tuple[str, str]) -> None:
    finished = doctor(*flags)
    assert finished.code == 2
    assert f"error: {flags[0]} {flags[1]}" in finished.output


def test_another_program_at_the_port_of_machine_0() -> None:
    """It takes the connection and says nothing."""
    with socket.socket() as silent:
        silent.bind(("0.0.0.0", 0))
        silent.listen()
        place = ["--num-machines", 2, "--machine-rank", 1, "--main-process-ip", own_address()]
        finished = doctor(*place, "--main-process-port", silent.getsockname()[1], "--timeout", 3)
    assert finished.code == 1
    assert "another program answers there" in finished.output


def own_address() -> str:
    addresses = [row.address for own in psutil.net_if_addrs().values() for row in own if row.family == socket.AF_INET]
    return next((address for address in addresses if not address.startswith("127.")), "") or pytest.skip(
        "no network here"
    )


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_one_that_is_ended(number: signal.Signals, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "accel_fsdp", "doctor", "--num-processes", "2", "--folder", str(tmp_path)]
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 60
    while len(ranks := psutil.Process(process.pid).children()) < 2:
        assert time.monotonic() < until
        time.sleep(0.05)
    process.send_signal(number)
    _, output = process.communicate(timeout=30)
    assert "Traceback" not in output
    assert psutil.wait_procs(ranks, timeout=10)[1] == []
    assert list(tmp_path.iterdir()) == []


def test_the_report_shows_no_values_that_may_be_secret() -> None:
    private = {"NCCL_TOPO_FILE": "/home/bob smith/x y.xml", "NCCL_KEY": "sk-proj-abcDEF-123", "NCCL_DEBUG": "INFO"}
    output = doctor("--report", **private).output
    assert "NCCL_TOPO_FILE=<set>" in output
    assert "NCCL_KEY=<set>" in output
    assert "NCCL_DEBUG=INFO" in output
    assert "torch 2." in output
