"""The watch against hangs as a callback of Trainer: it learns of steps, micro-batches, saves and evaluations."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from accel_fsdp.launch import Patience, Watch, watched
from accel_fsdp.launch_environment import LaunchEnvironment


class HangWatch(Watch, TrainerCallback):  # type: ignore[misc]
    """Without a `timeout` (0), there is none."""

    advice = "--hang_timeout says how long a step may take"

    def __init__(self, timeout: float | None, output_dir: Path, ddp_timeout: float = 0.0) -> None:
        Watch.__init__(self, Patience(timeout, ddp_timeout), output_dir)
        self.off, self._step = timeout == 0, 0

    def begin(self, main: int | None = None) -> None:
        """Begins to watch a thread of this process, else the one that calls, on all ranks; in the launcher's place."""
        watched.end()
        several = LaunchEnvironment.now().world_size > 1
        if not self.off and not (several and not dist.is_initialized()):
            super().begin(main)

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Around what is no step."""
        before, self._doing, self._since = self._doing, what, time.monotonic()
        try:
            yield
        finally:
            self._doing, self._since = before, time.monotonic()

    def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
        """A micro-batch is a sign that training goes on."""
        self._since = self._place_since = time.monotonic()

    on_prediction_step = on_substep_end

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Notes how long the step took, but of the first, in which much else happens."""
        now = time.monotonic()
        if not self._doing:
            self.patience.steps.append(now - self._since)
        self._doing, self._step, self._since = "", state.global_step, now
