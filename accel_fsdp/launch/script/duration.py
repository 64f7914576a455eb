"""How long a job will take, as far as its steps are known and the plan can say how long one takes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_fsdp.config import JobConfig
from accel_fsdp.errors import UserError
from accel_fsdp.hardware import MachineFacts, gpus
from accel_fsdp.job import from_arguments, from_yaml
from accel_fsdp.models import catalogue
from accel_fsdp.prediction import Step, cost, step_time
from accel_fsdp.prediction.tracing import by_name

FACTOR = 3
"""How much longer than predicted a step may take: data is read, checkpoints are written, the network is shared."""
AROUND_SECONDS = 3600
"""Before the first step and after the last: the model is loaded, rows are tokenized, a model is exported."""


@dataclass(frozen=True)
class Duration:
    """Steps, and what is predicted of one."""

    steps: int
    step: Step

    @property
    def minutes(self) -> int:
        return math.ceil((cost.seconds_of(self.steps, self.step).expected * FACTOR + AROUND_SECONDS) / 60)

    def __str__(self) -> str:
        return f"{self.steps:,} steps x {self.step.step_seconds:.2g} s x {FACTOR}, and an hour around them"


def predicted(
    arguments: Mapping[str, Any], config: JobConfig, machines: int, machine: MachineFacts | None
) -> Duration | None:
    """Of `train/sft.py` with these arguments, rows as long as they may be; None where something isn't known.

    A model is known that is bundled or lies here: a job file is written without the network.
    """
    model = str(arguments.get("model_name_or_path", ""))
    here = catalogue.find(model) or Path(model).is_dir()
    if not model or not here or machine is None or not machine.accelerator:
        return None
    ranks = {"num_machines": machines, "num_processes": machines * machine.count}
    try:
        gpu = gpus.find(machine.accelerator, machine.memory_gib)
        job = from_yaml.predictable(JobConfig({**config.values, **ranks}, config.source, config.absent), arguments)
        layout, recipe = job.layout, job.recipe
        steps = cost.work_of(from_arguments.schedule_of(arguments)).steps_of(recipe, layout.ranks)
        if not steps:
            return None
        shape, _ = by_name.read_shape(model, recipe)
    except (UserError, RuntimeError, KeyError, ImportError):
        return None
    return Duration(steps, step_time(shape, recipe, layout, gpu))
