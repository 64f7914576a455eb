"""The process that is asked what transformers knows: it answers, raises, ends, and never runs the caller again."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from accel_fsdp.errors import UserError
from accel_fsdp.exporter.second_process import SecondProcess

SCRIPT = """
import os
from accel_fsdp.exporter.second_process import SecondProcess
print("once", flush=True)
with SecondProcess() as pool:
    assert pool.submit(os.getpid).result() != os.getpid()
"""
LEFT_ALONE = """
import os, time
from accel_fsdp.exporter.second_process import SecondProcess
pool = SecondProcess()
print(pool.submit(os.getpid).result(), flush=True)
pool.submit(time.sleep, 600)
time.sleep(1)
os._exit(0)
"""


@pytest.fixture(scope="module")
def second() -> Iterator[SecondProcess]:
    with SecondProcess() as process:
        yield process


def test_it_answers_whatever_is_printed_there(second: SecondProcess) -> None:
    asked: list[Future[object]] = [second.submit(print, "something"), second.submit(os.getpid)]
    assert asked[0].result() is None
    assert asked[1].result() not in (None, os.getpid())
    assert second.submit(int, "11", base=2).result() == 3


def test_errors_come_back_as_they_are_with_their_traceback(second: SecondProcess) -> None:
    with pytest.raises(ValueError, match="invalid literal") as raised:
        second.submit(int, "x").result()
    assert "in _answer" in str(raised.value.__cause__)
    with pytest.raises(UserError, match="did not work"):
        second.submit(fail, UserError("it did not work", why="", fix="")).result()
    with pytest.raises(RuntimeError, match=r"^Particular: rare$"):
        second.submit(fail_in_particular).result()


class Particular(Exception):
    """An error that can be pickled, and not be made again from that."""

    def __init__(self, *, how: str) -> None:
        super().__init__(how)


def fail(error: Exception) -> None:
    raise error


def fail_in_particular() -> None:
    raise Particular(how="rare")


@pytest.mark.parametrize(
    ("ended", "how"), [((os._exit, 3), "with exit code 3"), ((signal.raise_signal, signal.SIGKILL), "by SIGKILL")]
)
def test_its_end_is_an_error_of_ours(ended: tuple[object, int], how: str) -> None:
    with SecondProcess() as process:
        for _ in range(2):
            with pytest.raises(UserError, match=how):
                process.submit(*ended).result()  # type: ignore[arg-type]


def test_it_ends_in_the_midst_of_its_work_with_whoever_asked() -> None:
    """Left early, it is gone at once; and so it is when the first process ends without another word."""
    with SecondProcess() as process:
        number = process.submit(os.getpid).result()
        process.submit(time.sleep, 600)
    assert not is_running(number)
    done = subprocess.run([sys.executable, "-c", LEFT_ALONE], capture_output=True, text=True, timeout=60, check=True)
    for _ in range(100):
        if not is_running(int(done.stdout)):
            return
        time.sleep(0.1)
    raise AssertionError("the second process outlives the first one")


def is_running(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("piped", [False, True], ids=["as a file", "as standard input"])
def test_a_script_runs_once(piped: bool, tmp_path: Path) -> None:
    """It needs no `if __name__ == "__main__":`."""
    (tmp_path / "script.py").write_text(SCRIPT)
    words = [sys.executable] if piped else [sys.executable, "script.py"]
    done = subprocess.run(words, cwd=tmp_path, input=SCRIPT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "once\n", "")
