"""Profiles steps of a run: torch's trace of each rank, on GPUs with a memory snapshot. Other steps run unchanged."""

import os
import re
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile
from transformers import TrainerCallback, TrainerState

from accel_fsdp import atomic_files, console
from accel_fsdp.errors import UsageError, in_a_line
from accel_fsdp.library_internals import Internal
from accel_fsdp.training.reporting.progress import Tally

RELIES_ON = (
    Internal("torch.cuda.memory:_record_memory_history", "enabled *"),
    Internal("torch.cuda.memory:_dump_snapshot", "filename *"),
)


def steps_of(text: str) -> range:
    """The steps of `--profile_steps`: `3:5` are 3, 4 and 5; `3` is step 3 alone."""
    match = re.fullmatch(r"([1-9]\d*)(?::([1-9]\d*))?", text.strip())
    steps = range(int(match[1]), int(match[2] or match[1]) + 1) if match else range(0)
    if not steps:
        raise UsageError(f"--profile_steps {text}", why="it has to be FIRST:LAST, from 1 on", fix="--profile_steps 3:5")
    return steps


class StepProfiler(TrainerCallback):  # type: ignore[misc]
    """Profiles the steps of `--profile_steps` on each rank."""

    def __init__(self, args: Any, tally: Tally) -> None:
        self.steps, self.tally = steps_of(args.profile_steps), tally
        self.folder, self.rank = Path(args.output_dir) / "profile", int(args.process_index)
        self.on_gpu = args.device.type == "cuda"
        self.profiler: profile | None = None

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # Kineto logs each start and stop

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self.profiler is None and state.global_step + 1 in self.steps:
            if self.on_gpu:
                torch.cuda.memory._record_memory_history(stacks="python")
            self.profiler = profile(record_shapes=True, profile_memory=True)
            self.profiler.start()

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self.profiler and state.global_step >= self.steps[-1]:
            self._write(self.profiler)

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self.profiler:  # the run ended early
            self._write(self.profiler)
        elif self.rank == 0 and state.global_step < self.steps[0]:
            console.say(f"--profile_steps: no step is profiled, as step {state.global_step:,} was the last one")

    def _write(self, profiler: profile) -> None:
        self.profiler = None
        try:
            profiler.stop()
            with atomic_files.new_file(self.folder / f"trace-rank{self.rank}.json.gz") as path:
                profiler.export_chrome_trace(str(path))
            if self.on_gpu:
                with atomic_files.new_file(self.folder / f"memory-rank{self.rank}.pickle") as path:
                    torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
                torch.cuda.memory._record_memory_history(None)
            if self.rank == 0:
                opens = "https://ui.perfetto.dev opens traces, https://pytorch.org/memory_viz memory snapshots"
                console.say(f"profile: {self.folder}; {opens}")
        except Exception as error:  # such as a full disk, which must not end the run
            console.say(f"rank {self.rank}: the profile is not complete: {in_a_line(error)}", style="yellow")
        self.tally.skip()
