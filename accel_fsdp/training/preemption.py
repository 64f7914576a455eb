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

RELIES_ON = (Internal("torch.distributed.distributed_c10d:_get_default_store", ""),)
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
SAME_SIGNAL_SECONDS = 5.0
"""A scheduler signals launcher and ranks alike, and then the launcher its ranks: that is one wish, not two."""
SAME_KEY_SECONDS = 1.0
"""The terminal sends Ctrl-C to launcher and ranks alike, and the launcher hands it on at once; a person who presses it
again does so later."""
KEY = "accel_fsdp/stop"


class Stop(TrainerCallback):  # type: ignore[misc]
    """Holds the signal back until the end of a step that all ranks agree on; a second one ends the process at once.

    The agreement costs each rank one question to the job's store per step and waits for nobody. A rank that was
    signalled names the step after its own: the others can't end that one without it, so all of them read the name in
    time. The signal is noted by a thread, as Python's own handlers wait while the main thread is in a collective.
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
        """From here on there is something to save; before, a signal ends the process as it always does."""
        if args.world_size == 1 or dist.is_initialized():
            self._listen()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Asks for a checkpoint and the end of training, on all ranks after the same step."""
        self.agreed = self._agreed_on(state.global_step)
        if self.agreed:
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Trainer ends the epoch that was broken off as if it were complete, and would save and evaluate again."""
        if self.agreed:
            control.should_save = control.should_evaluate = control.should_log = False

    def _agreed_on(self, step: int) -> str:
        """The name of the signal, where ranks stop after this step."""
        name = signal.Signals(self.signal).name if self.signal else ""
        if not dist.is_initialized():
            return name
        store = distributed_c10d._get_default_store()
        if name and not store.check([KEY]):
            store.set(KEY, f"{step + 1} {name}")
        if not store.check([KEY]):
            return ""
        last, by = store.get(KEY).decode().split()
        return by if int(last) <= step else ""

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
            if not self.signal:
                self.signal, self._noted_at = number[0], time.monotonic()
                self._announce()
            elif time.monotonic() - self._noted_at > self._one_wish(number[0]):
                os._exit(128 + number[0])
        os.close(reader)

    def _one_wish(self, number: int) -> float:
        """Seconds within which a further signal is an echo of the first."""
        twice = self.signal == number == signal.SIGINT
        return SAME_KEY_SECONDS if twice else SAME_SIGNAL_SECONDS

    def _announce(self) -> None:
        if LaunchEnvironment.now().rank == 0:
            name = "Ctrl-C" if self.signal == signal.SIGINT else signal.Signals(self.signal).name
            console.say(
                f"{name}: training saves a checkpoint within two steps and stops; "
                "a second signal ends this rank at once, without saving",
                style="yellow",
            )

    def ignore(self) -> None:
        """Lets nothing interrupt a rank that has saved and leaves: the launcher signals those that it sees last."""
        for number in self._before:
            self._before[number] = signal.SIG_IGN

    def release(self) -> None:
        """Gives the signals back to what handled them before training."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
        if self._pipe is not None:
            signal.set_wakeup_fd(-1)
            os.close(self._pipe)
            self._pipe = None

    def give_in(self) -> None:
        """Ends this process by the signal that was held back, where one was: its job has failed elsewhere."""
        if self.signal:
            with contextlib.suppress(ProcessLookupError):
                signal.signal(self.signal, signal.SIG_DFL)
                os.kill(os.getpid(), self.signal)
