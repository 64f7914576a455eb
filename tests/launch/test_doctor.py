"""`accel-fsdp doctor`: what it looks at on one machine, and the links of a job that it measures."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import hosts
import pytest
from conftest import Finished, made_yaml, run

DOCTOR = [sys.executable, "-m", "accel_fsdp", "doctor"]
MOUNTS = subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode == 0
SMALL = 'mount -t tmpfs -o size=1m tmpfs "$0"; head -c 2000000 /dev/zero > "$0/left"; exec "$@"'
SMI = """\
#!/bin/bash
case "$*" in
  -L) echo 'GPU 0: NVIDIA H100'; echo 'GPU 1: NVIDIA H100' ;;
  *driver_version*) echo 580.65.06; echo 580.65.06 ;;
  *memory.total*) echo 'NVIDIA H100 80GB HBM3, 81559'; echo 'NVIDIA H100 80GB HBM3, 81559' ;;
  topo*) echo '     GPU0 GPU1'; echo 'GPU0 X NV18'; echo 'GPU1 NV18 X' ;;
esac
"""
SECONDS = 120


def doctor(*words: object, **environment: str) -> Finished:
    return run([*DOCTOR, *map(str, words)], **environment)


def test_what_this_machine_is() -> None:
    finished = doctor()
    assert finished.code == 0, finished.output
    for subject in ("system", "libraries", "GPUs", "memory", "/dev/shm", "limits", "disk", "interfaces", "variables"):
        assert re.search(rf"^(ok|warning) +{subject} ", finished.output, flags=re.MULTILINE), subject


def test_a_machine_without_gpus_is_not_healthy_and_launch_starts_nothing_there(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print()\n")
    (yaml := tmp_path / "job.yaml").write_text(made_yaml(model="gpt2", num_processes="2"))
    nowhere = {"CUDA_VISIBLE_DEVICES": ""}
    finished = doctor(**nowhere)
    assert re.search(r"^warning +GPUs +this machine has no usable GPU", finished.output, flags=re.MULTILINE)
    assert "every rank would train the whole model alone" in finished.output
    assert "healthy" not in finished.output
    launched = run([*DOCTOR[:-1], "launch", str(yaml), str(tmp_path / "train.py")], **nowhere)
    assert launched.code == 1
    assert "would train unsharded" in launched.output


def test_gpus_that_torch_cannot_use(tmp_path: Path) -> None:
    (smi := tmp_path / "nvidia-smi").write_text(SMI)
    smi.chmod(0o755)
    finished = doctor(PATH=f"{tmp_path}:{os.environ['PATH']}", CUDA_VISIBLE_DEVICES="0,1")
    assert finished.code == 1
    assert re.search(r"^error +GPUs ", finished.output, flags=re.MULTILINE), finished.output
    report = json.loads(doctor("--json", PATH=f"{tmp_path}:{os.environ['PATH']}").output)
    assert (report["facts"]["gpus"], report["facts"]["links"]) == (["NVIDIA H100 80GB HBM3"] * 2, {"NV18": 1})
    assert report["facts"]["driver"] == "580.65.06"


@pytest.mark.skipif(not MOUNTS, reason="mounts of its own are not allowed")
def test_full_shared_memory_and_a_full_disk(tmp_path: Path) -> None:
    finished = run(["unshare", "--mount", "bash", "-c", SMALL, "/dev/shm", *DOCTOR])
    assert finished.code == 1
    assert re.search(r"error +/dev/shm +0\.0 MiB free of 1\.0 MiB", finished.output)
    words = [*DOCTOR, "--folder", tmp_path / "runs" / "first"]
    finished = run(["unshare", "--mount", "bash", "-c", SMALL, tmp_path, *words])
    assert finished.code == 1
    assert re.search(r"error +disk +No space left on device on tmpfs", finished.output)
    assert list(tmp_path.iterdir()) == []


def test_an_interface_that_is_not_there_and_a_variable_that_slows_a_job_down() -> None:
    finished = doctor(NCCL_SOCKET_IFNAME="ib7", CUDA_LAUNCH_BLOCKING="1")
    assert finished.code == 1
    assert "NCCL_SOCKET_IFNAME=ib7: this machine has no interface ib7" in finished.output
    assert "unset CUDA_LAUNCH_BLOCKING" in finished.output
    assert "1 error, " in finished.output


def test_the_report_shows_no_values_that_may_be_secret() -> None:
    private = {"NCCL_TOPO_FILE": "/home/bob smith/x y.xml", "NCCL_KEY": "sk-proj-abcDEF-123", "NCCL_DEBUG": "INFO"}
    output = doctor("--report", **private).output
    assert "NCCL_TOPO_FILE=<set>" in output
    assert "NCCL_KEY=<set>" in output
    assert "NCCL_DEBUG=INFO" in output
    assert "torch 2." in output
    assert str(Path.cwd()) not in output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--json", "--report"), "each is a form of the same report"),
        (("--machine-rank", "1"), "--machine-rank without --bandwidth"),
    ],
)
def test_flags_that_do_not_go_together(words: tuple[str, ...], message: str) -> None:
    finished = doctor(*words)
    assert finished.code == 2
    assert message in finished.output


def measured(output: str) -> set[tuple[str, str]]:
    """The collectives and sizes that have a bandwidth."""
    return set(re.findall(r"^(all-\w+) +(\d+ [KM]iB) +[\d,.]+ m?s +[\d,.]+ [MG]B/s", output, flags=re.MULTILINE))


@pytest.mark.slow
def test_the_links_of_a_job_on_one_machine(tmp_path: Path) -> None:
    (yaml := tmp_path / "job.yaml").write_text(made_yaml(model="gpt2", num_processes="2"))
    finished = doctor("--bandwidth", yaml)
    assert finished.code == 0, finished.output
    assert "2 ranks on 1 machine: " in finished.output
    assert len(measured(finished.output)) == 6
    yaml.write_text("distributed_type: 'NO'\nuse_cpu: true\n")
    finished = doctor("--bandwidth", yaml)
    assert (finished.code, "one rank has no link" in finished.output) == (1, True), finished.output


@pytest.mark.skipif(bool(hosts.missing()), reason=hosts.missing())
def test_the_links_of_a_job_on_two_machines(tmp_path: Path) -> None:
    (yaml := tmp_path / "job.yaml").write_text(
        made_yaml(model="gpt2", num_processes="2", num_machines="2", main_process_ip="n1")
    )
    with hosts.network("n1", "n2") as machines:
        started = [
            machine.start(["-m", "accel_fsdp", "doctor", "--bandwidth", yaml, "--machine-rank", str(rank)])
            for rank, machine in enumerate(machines)
        ]
        finished = hosts.all_ended(started, SECONDS)
    output = "".join(machine.output for machine in finished)
    assert [machine.code for machine in finished] == [0, 0], output
    assert "2 ranks on 2 machines: the interface " in output
    assert len(measured(output)) == 6
