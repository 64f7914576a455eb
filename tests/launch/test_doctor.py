"""`accel-fsdp doctor`: what it looks at on one machine, and the links of a job that it measures."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import hosts
import pytest
from conftest import here, made_yaml, run

MOUNTS = subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode == 0
SMALL = (
    'for folder in "$0" /dev/shm; do mount -t tmpfs -o size=1m tmpfs "$folder"; '
    'head -c 2000000 /dev/zero > "$folder/left"; done; exec "$@"'
)
SMI = """\
#!/bin/bash
case "$*" in
  -L) echo 'GPU 0: NVIDIA H100'; echo 'GPU 1: NVIDIA H100' ;;
  *driver_version*) echo 580.65.06; echo 580.65.06 ;;
  *memory.total*) echo 'NVIDIA H100 80GB HBM3, 81559'; echo 'NVIDIA H100 80GB HBM3, 81559' ;;
  topo*) echo '     GPU0 GPU1'; echo 'GPU0 X NV18'; echo 'GPU1 NV18 X' ;;
esac
"""
SUBJECTS = ("system", "libraries", "GPUs", "memory", "/dev/shm", "limits", "disk", "interfaces", "variables")
SECONDS = 120


def test_a_machine_without_gpus_is_not_healthy_and_launch_starts_nothing_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    finished = here("doctor")
    assert finished.code == 0, finished.output
    for subject in SUBJECTS:
        assert re.search(rf"^(ok|warning) +{subject} ", finished.output, flags=re.MULTILINE), subject
    assert re.search(r"^warning +GPUs +this machine has no usable GPU", finished.output, flags=re.MULTILINE)
    assert "every rank would train the whole model alone" in finished.text
    assert "healthy" not in finished.output
    assert json.loads(here("doctor", "--json").printed)["healthy"] is False
    (tmp_path / "train.py").write_text("print()\n")
    (tmp_path / "job.yaml").write_text(made_yaml(model="gpt2", num_processes="2"))
    launched = here("launch", tmp_path / "job.yaml", tmp_path / "train.py")
    assert (launched.code, "would train unsharded" in launched.output) == (1, True), launched.output


def test_gpus_that_torch_cannot_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (smi := tmp_path / "nvidia-smi").write_text(SMI)
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    finished = here("doctor", "--json")
    report = json.loads(finished.printed)
    assert (finished.code, report["facts"]["driver"]) == (1, "580.65.06")
    assert (report["facts"]["gpus"], report["facts"]["links"]) == (["NVIDIA H100 80GB HBM3"] * 2, {"NV18": 1})
    assert [row for row in report["rows"] if (row["subject"], row["verdict"]) == ("GPUs", "error")], report["rows"]


@pytest.mark.skipif(not MOUNTS, reason="mounts of its own are not allowed")
def test_full_shared_memory_and_a_full_disk(tmp_path: Path) -> None:
    doctor = [sys.executable, "-m", "accel_fsdp", "doctor", "--folder", tmp_path / "runs" / "first"]
    finished = run(["unshare", "--mount", "bash", "-c", SMALL, tmp_path, *doctor])
    assert finished.code == 1
    assert re.search(r"error +/dev/shm +0\.0 MiB free of 1\.0 MiB", finished.output), finished.output
    assert re.search(r"error +disk +No space left on device on tmpfs", finished.output), finished.output
    assert list(tmp_path.iterdir()) == []


def test_wrong_variables_are_errors_and_the_report_shows_no_values_that_may_be_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    private = {"NCCL_TOPO_FILE": "/home/bob smith/x y.xml", "NCCL_KEY": "sk-proj-abcDEF-123", "NCCL_DEBUG": "INFO"}
    for name, value in private.items():
        monkeypatch.setenv(name, value)
    report = here("doctor", "--report").output
    for shown in ("NCCL_TOPO_FILE=<set>", "NCCL_KEY=<set>", "NCCL_DEBUG=INFO", "torch 2."):
        assert shown in report
    assert str(Path.cwd()) not in report
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib7")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    finished = here("doctor")
    assert finished.code == 1
    assert "NCCL_SOCKET_IFNAME=ib7: this machine has no interface ib7" in finished.text
    assert "unset CUDA_LAUNCH_BLOCKING" in finished.text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--json", "--report"), "each is a form of the same report"),
        (("--machine-rank", "1"), "--machine-rank without --bandwidth"),
    ],
)
def test_flags_that_do_not_go_together(words: tuple[str, ...], message: str) -> None:
    finished = here("doctor", *words)
    assert (finished.code, message in finished.output) == (2, True), finished.output


@pytest.mark.skipif(bool(hosts.missing()), reason=hosts.missing())
def test_the_links_of_a_job_on_two_machines(tmp_path: Path) -> None:
    (yaml := tmp_path / "job.yaml").write_text(
        made_yaml(model="gpt2", num_processes="2", num_machines="2", main_process_ip="n1")
    )
    words = ["-m", "accel_fsdp", "doctor", "--bandwidth", yaml, "--machine-rank"]
    with hosts.network("n1", "n2") as machines:
        started = [machine.start([*words, str(rank)]) for rank, machine in enumerate(machines)]
        finished = hosts.all_ended(started, SECONDS)
    output = "".join(machine.output for machine in finished)
    assert [machine.code for machine in finished] == [0, 0], output
    assert "2 ranks on 2 machines: the interface " in output
    rows = re.findall(r"^(all-\w+) +(\d+ [KM]iB) +[\d,.]+ m?s +[\d,.]+ [MG]B/s", output, flags=re.MULTILINE)
    assert len(set(rows)) == 6
