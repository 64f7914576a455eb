"""The predicted duration of a job, if its number of steps is known."""

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from accel_fsdp.config import JobConfig
from accel_fsdp.errors import UserError
from accel_fsdp.hardware import MachineFacts, gpus
from accel_fsdp.job import from_arguments, from_yaml
from accel_fsdp.models import catalogue
from accel_fsdp.prediction import Problem, Step
from accel_fsdp.prediction.tracing import by_name

Arguments: TypeAlias = Mapping[str, Any]
FACTOR = 3
"""A step may take this many times the prediction: data is read, checkpoints are written, the network is shared."""
AROUND_SECONDS = 3600
"""Seconds before the first step and after the last: to load the model, tokenize rows and export the model."""


@dataclass(frozen=True)
class Duration:
    """The number of steps, and the predicted time of one."""

    steps: int
    step: Step

    @property
    def minutes(self) -> int:
        return math.ceil((self.steps * self.step.step_seconds * FACTOR + AROUND_SECONDS) / 60)

    def __str__(self) -> str:
        return f"{self.steps:,} steps x {self.step.step_seconds:.2g} s x {FACTOR}, and an hour around them"


def predicted(arguments: Arguments, config: JobConfig, machines: int, machine: MachineFacts | None) -> Duration | None:
    """The duration of `train/sft.py` with these arguments and rows of full length; None where a number is unknown."""
    with contextlib.suppress(*UNKNOWN):
        problem = _problem_to_plan(arguments, config, machines, machine)
        steps = from_arguments.positive_int(arguments.get("max_steps"))
        if steps and not problem.job.layout.is_by_transformers:
            return Duration(steps, problem.step(problem.job))
    return None


UNKNOWN = (UserError, RuntimeError, KeyError, ImportError)


def _problem_to_plan(arguments: Arguments, config: JobConfig, machines: int, machine: MachineFacts | None) -> Problem:
    """The job as a problem for the planner; raises one of UNKNOWN if it can't be planned.

    The model must be bundled or on this machine, because a job file is written without network access.
    """
    model = str(arguments.get("model_name_or_path", ""))
    is_readable = catalogue.find(model) or Path(model).is_dir()
    if not model or not is_readable or machine is None or not machine.accelerator:
        raise KeyError(model)
    ranks = {"num_machines": machines, "num_processes": machines * machine.count}
    gpu = gpus.find(machine.accelerator, machine.memory_gib)
    job = from_yaml.predictable(JobConfig({**config.values, **ranks}, config.source, config.absent), arguments)
    return Problem(*by_name.read_shape(model, job.recipe), gpu, job)
