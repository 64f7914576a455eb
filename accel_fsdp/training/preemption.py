"""SIGTERM, SIGUSR1 and Ctrl-C during training: all ranks stop after the same step, with a checkpoint."""

import contextlib
import os
import signal
import threading
import time
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from accel_fsdp import console
from accel_fsdp.launch_environment import LaunchEnvironment
from accel_fsdp.library_internals import Internal
from accel_fsdp.ranks import stacks

RELIES_ON = (Internal("torch.distributed.distributed_c10d:_get_default_store", ""),)
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
SAME_SIGNAL_SECONDS = 5.0
"""A scheduler signals launcher and ranks, and then the launcher its ranks: both signals are one request to stop."""
SAME_KEY_SECONDS = 1.0
"""The terminal sends Ctrl-C to launcher and ranks, and the launcher forwards it at once; a user who presses it again
does so later."""
STORE_KEY = "accel_fsdp/stop"


class Stop(TrainerCallback):  # type: ignore[misc]
    """Defers a signal until the end of a step that all ranks agree on; a second signal ends the process at once.

    The agreement costs each rank one request to the job's store per step, without waiting. A signalled rank names the
    step after its own: the others can't end that step without it, so all of them read the name in time. A thread
    records the signal, as Python's own handlers wait while the main thread is in a collective.
    """

    def __init__(self) -> None:
        self.signal = 0
        self.agreed = ""
        self._noted_at = 0.0
        self._pipe: int | None = None
        self._before: dict[int, Any] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begins to handle signals. Before training there is no state to save, so a signal ends the process.

        `--auto_find_batch_size` begins again after each batch that doesn't fit.
        """
        if self._pipe is None and (args.world_size == 1 or dist.is_initialized()):
            self._listen()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Requests a checkpoint and the end of training, on all ranks after the same step."""
        self.agreed = self._agreed_signal(state.global_step)
        if self.agreed:
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Prevents a second save and evaluation: Trainer ends an interrupted epoch as if it were complete."""
        if self.agreed:
            control.should_save = control.should_evaluate = control.should_log = False

    def _agreed_signal(self, step: int) -> str:
        """The name of the signal if the ranks stop after this step, else empty."""
        name = signal.Signals(self.signal).name if self.signal else ""
        if not dist.is_initialized():
            return name
        store = distributed_c10d._get_default_store()
        if name and not store.check([STORE_KEY]):
            store.set(STORE_KEY, f"{step + 1} {name}")
        if not store.check([STORE_KEY]):
            return ""
        last, signal_name = store.get(STORE_KEY).decode().split()
        return signal_name if int(last) <= step else ""

    def _listen(self) -> None:
        reader, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        signal.set_wakeup_fd(self._pipe, warn_on_full_buffer=False)
        for number in SIGNALS:
            self._before[number] = signal.signal(number, lambda *_: None)
        threading.Thread(target=self._note, args=(reader,), daemon=True).start()

    def _note(self, reader: int) -> None:
        while number := os.read(reader, 1):
            if number[0] not in SIGNALS:
                continue
            if number[0] == signal.SIGTERM:
                stacks.write()  # the launcher may end this rank because another one has failed
            if not self.signal:
                self.signal, self._noted_at = number[0], time.monotonic()
                self._announce()
            elif time.monotonic() - self._noted_at > self._same_request_seconds(number[0]):
                os._exit(128 + number[0])
        os.close(reader)

    def _same_request_seconds(self, number: int) -> float:
        """Seconds within which a further signal counts as the same request."""
        is_second_ctrl_c = self.signal == number == signal.SIGINT
        return SAME_KEY_SECONDS if is_second_ctrl_c else SAME_SIGNAL_SECONDS

    def _announce(self) -> None:
        if LaunchEnvironment.now().rank == 0:
            name = "Ctrl-C" if self.signal == signal.SIGINT else signal.Signals(self.signal).name
            console.say(
                f"{name}: training saves a checkpoint within two steps and stops; a second signal ends this rank "
                f"without saving, if it comes {self._same_request_seconds(self.signal):g} s later or more",
                style="yellow",
            )

    def leave_ignored(self) -> None:
        """Makes `release` ignore signals: the launcher signals ranks that have saved and are about to exit."""
        for number in self._before:
            self._before[number] = signal.SIG_IGN

    def release(self) -> None:
        """Restores the signal handlers from before the training."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
        if self._pipe is not None:
            signal.set_wakeup_fd(-1)
            os.close(self._pipe)
            self._pipe = None

    def end_by_signal(self) -> None:
        """Ends this process by the deferred signal, if any: the job has failed on another rank."""
        if self.signal:
            with contextlib.suppress(ProcessLookupError):
                signal.signal(self.signal, signal.SIG_DFL)
                os.kill(os.getpid(), self.signal)
