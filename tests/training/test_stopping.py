"""Ctrl-C in training: one saves and stops, a second ends the process. One process, no launch."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Finished

from accel_fsdp.checkpoints import completeness
from accel_fsdp.training import SAME_KEY_SECONDS, SIGNALS, Stop, trainer


def test_ctrl_c_saves_and_stops_and_the_run_goes_on(
    trains: Callable[..., Finished], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--max_steps", "6", "--save_steps", "100")
    before = {number: signal.getsignal(number) for number in SIGNALS}
    step = trainer.SftTrainer.training_step
    calls: list[int] = []

    def interrupted(self: Any, *args: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)  # the thread that notes it
        return step(self, *args)

    monkeypatch.setattr(trainer.SftTrainer, "training_step", interrupted)
    stopped = trains(*flags, code=75)
    assert "Ctrl-C: training saves a checkpoint within two steps and stops; a second signal ends" in stopped.output
    assert "stopped: SIGINT after step 3" in stopped.output
    assert completeness.choose(tmp_path / "run").newest == tmp_path / "run" / "checkpoint-3"
    for number, handler in before.items():  # which a process that has saved ignores while it leaves
        assert signal.signal(number, handler) == signal.SIG_IGN
    trains(*flags, "--resume_from_checkpoint", "true")
    assert len(calls) == 6
    assert signal.getsignal(signal.SIGINT) == before[signal.SIGINT]


def test_after_a_smaller_batch_a_signal_still_stops_and_the_same_command_resumes(
    trains: Callable[..., Finished], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--auto_find_batch_size` begins training twice in one process."""
    flags = ("--per_device_train_batch_size", "4", "--auto_find_batch_size", "true")
    before = {number: signal.getsignal(number) for number in SIGNALS}
    step = trainer.SftTrainer.training_step
    sizes: list[int] = []

    def scarce(self: Any, model: Any, inputs: Any, *args: Any) -> Any:
        sizes.append(len(inputs["input_ids"]))
        if sizes[-1] > 3:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        if len(sizes) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)
        return step(self, model, inputs, *args)

    monkeypatch.setattr(trainer.SftTrainer, "training_step", scarce)
    trains(*flags, code=75)
    for number, handler in before.items():
        assert signal.signal(number, handler) == signal.SIG_IGN
    resumed = trains(*flags, "--resume_from_checkpoint", "true")
    assert "--auto_find_batch_size goes on with 3 rows per device" in resumed.output
    assert sizes == [4, 3, 3, 3, 3]
    assert {number: signal.getsignal(number) for number in SIGNALS} == before


def test_a_second_ctrl_c_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """An echo of the first, by the launcher, doesn't."""
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    stop = Stop()
    stop._listen()
    try:
        for seconds in (0.0, 0.1, SAME_KEY_SECONDS + 0.1):
            time.sleep(seconds)
            assert not ended
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
        assert ended == [130]
    finally:
        stop.release()
