"""`accel-fsdp launch` of a script that Accelerate starts directly, without torchrun: signals, exit codes, MULTI_CPU."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from conftest import ROOT, accel_fsdp

ALONE = "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nmixed_precision: 'no'\nnum_processes: 1\n"
SAVES_AND_STOPS = """import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
os.write(1, b'%d\\n' % os.getpid())
time.sleep(20)
"""
"""A script that ends with code 75 at SIGTERM, as train/sft.py does, and by default at other signals."""


@contextmanager
def launched(tmp_path: Path, script: str) -> Iterator[tuple["subprocess.Popen[str]", psutil.Process]]:
    """Runs `accel-fsdp launch` of a script that prints its process; yields launcher and script, and ends both."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "job.yaml").write_text(ALONE)
    (tmp_path / "own.py").write_text(script)
    words = [sys.executable, "-m", "accel_fsdp", "launch", str(tmp_path / "job.yaml"), str(tmp_path / "own.py")]
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, **pipes, text=True, start_new_session=True, env=environment) as launcher:
        assert launcher.stdout is not None
        child = psutil.Process(int(launcher.stdout.readline()))
        try:
            yield launcher, child
        finally:
            for process in (launcher, child):
                if process.poll() is None if isinstance(process, subprocess.Popen) else process.is_running():
                    process.kill()


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("to_group", [False, True])
@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("SIGTERM", 75, "exit code 75"),
        ("SIGHUP", 129, "exit code 129 (SIGHUP)"),
        ("SIGINT", 130, "exit code 130 (SIGINT)"),
    ],
)
def test_a_signal_reaches_the_script_and_its_code_is_the_launchers(
    name: str, code: int, said: str, to_group: bool, tmp_path: Path
) -> None:
    with launched(tmp_path, SAVES_AND_STOPS) as (launcher, child):
        (os.killpg if to_group else os.kill)(launcher.pid, signal.Signals[name])
        _, errors = launcher.communicate(timeout=60)
        assert launcher.returncode == code, errors
        assert f"accel-fsdp: the script ended with {said}" in errors
        assert not child.is_running()
    assert not list((tmp_path / "tmp").iterdir())


CPUS = "distributed_type: MULTI_CPU\nmixed_precision: 'no'\nnum_machines: 1\nnum_processes: 2\nuse_cpu: true\n"
SAYS_WHO = """from accelerate import Accelerator
import os
accelerator = Accelerator()
place = os.environ["RANK"] + " of " + os.environ["WORLD_SIZE"]
mean = accelerator.reduce(__import__("torch").tensor(float(accelerator.process_index)), "mean").item()
os.write(1, f"rank {place}, {accelerator.distributed_type}, {accelerator.device}, mean {mean}\\n".encode())
"""


def test_processes_on_cpus_start_without_mpirun(tmp_path: Path) -> None:
    """Accelerate alone would start one."""
    (tmp_path / "job.yaml").write_text(CPUS)
    (tmp_path / "own.py").write_text(SAYS_WHO)
    finished = accel_fsdp("launch", tmp_path / "job.yaml", tmp_path / "own.py")
    assert finished.code == 0, finished.output
    for rank in range(2):
        assert f"rank {rank} of 2, DistributedType.MULTI_CPU, cpu:0, mean 0.5\n" in finished.output


IGNORES = (
    "import signal\nprint([signal.getsignal(number).name for number in (signal.SIGINT, signal.SIGHUP)], flush=True)\n"
)


def test_signals_that_a_shell_ignores_stay_ignored(tmp_path: Path) -> None:
    """`nohup accel-fsdp launch ... &` in a script; the launcher says what ends the job instead."""
    (tmp_path / "job.yaml").write_text(ALONE)
    (tmp_path / "own.py").write_text(IGNORES)
    command = f"trap '' INT HUP; exec {sys.executable} -m accel_fsdp launch {tmp_path}/job.yaml {tmp_path}/own.py"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "['SIG_IGN', 'SIG_IGN']\n"), done.stderr
    assert "SIGINT is ignored, as in the background of a shell; kill -TERM ends the job" in done.stderr
