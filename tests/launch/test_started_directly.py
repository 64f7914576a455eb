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


@pytest.mark.parametrize(("ends", "code"), [("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 15)", 143)])
def test_a_script_that_fails_alone_gives_its_code_and_no_traceback(ends: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(ALONE)
    (tmp_path / "own.py").write_text(f"{ends}\n")
    finished = accel_fsdp("launch", tmp_path / "job.yaml", tmp_path / "own.py")
    assert finished.code == code, finished.output
    assert "Traceback" not in finished.output
