"""The watch against hangs as a callback of Trainer, which reports steps, micro-batches, saves and evaluations."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from accel_fsdp.launch import Patience, Watchdog, watched
from accel_fsdp.launch_environment import LaunchEnvironment


class HangWatch(Watchdog, TrainerCallback):  # type: ignore[misc]
    """A `timeout` of 0 turns the watch off."""

    advice = "--hang_timeout says how long a step may take"

    def __init__(self, timeout: float | None, output_dir: Path, ddp_timeout: float = 0.0) -> None:
        Watchdog.__init__(self, Patience(timeout, ddp_timeout), output_dir)
        self.off, self._step = timeout == 0, 0

    def begin(self, main: int | None = None) -> None:
        """Begins to watch a thread of this process, by default the calling one; replaces the launcher's watch."""
        watched.end()
        is_multi = LaunchEnvironment.now().world_size > 1
        if not self.off and not (is_multi and not dist.is_initialized()):
            super().begin(main)

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Marks a part of the run, such as a save, that isn't a training step."""
        before, self._doing, self._since = self._doing, what, time.monotonic()
        try:
            yield
        finally:
            self._doing, self._since = before, time.monotonic()

    def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
        """Counts a micro-batch as progress."""
        self._since = self._place_since = time.monotonic()

    on_prediction_step = on_substep_end

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Records the duration of the step, except the first, which includes the start."""
        now = time.monotonic()
        if not self._doing:
            self.patience.steps.append(now - self._since)
        self._doing, self._step, self._since = "", state.global_step, now
