"""The job of a YAML and its script's arguments as a problem: on its GPUs, with its model. Does it fit?"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from accel_fsdp.config import JobConfig, made_with
from accel_fsdp.errors import UsageError, UserError
from accel_fsdp.hardware import Gpu, MachineFacts, gpus, machines
from accel_fsdp.job import Job, Recipe, from_yaml
from accel_fsdp.models import catalogue
from accel_fsdp.prediction import search
from accel_fsdp.prediction.changes import remedies
from accel_fsdp.prediction.memory import ModelShape, Tapes
from accel_fsdp.prediction.problem import Problem, length_of
from accel_fsdp.units import counted, gib_of

ReadShape: TypeAlias = Callable[[str, Recipe], tuple[ModelShape, Mapping[str, Tapes]]]
"""Reads a model's shape and tapes by its name; that of `prediction.tracing` also records."""
UNKNOWN = (UserError, RuntimeError, KeyError, ImportError)
"""What a job raises that can't be predicted."""


def model_of(config: JobConfig, arguments: Mapping[str, Any]) -> str:
    """The model of a job: the script's, else that of the command in the YAML's header; empty if neither names one."""
    return str(arguments.get("model_name_or_path") or made_with(config.source).get("--model", ""))


def gpu_of(machine: MachineFacts, flag: str = "--gpus") -> Gpu:
    """The GPU of a machine that a flag describes.

    Raises:
        UsageError: the machine has no GPU, or an unknown one.
    """
    if machine.accelerator is None:
        raise UsageError(
            f"{flag} cpu has no GPU memory to plan for", why="a plan is about GPUs", fix=f"{flag} 8xH100-80GB"
        )
    return gpus.find(machine.accelerator, machine.memory_gib)


def problem_of(
    config: JobConfig, job: Job, model: str, machine: str, read_shape: ReadShape, default_length: bool = False
) -> Problem:
    """The `job` of a YAML on GPUs such as `8xH100-80GB`; its length is given, or the default for the model.

    Raises:
        UserError: the GPUs or the model are unknown, or aren't those of the YAML.
    """
    described, _ = machines.parse(machine)
    gpu = gpu_of(described)
    _check_ranks(config, job, machine)
    shape, tapes = read_shape(model, job.recipe)
    for misfit in shape.division.misfits(job.layout.sizes, job.recipe.method):
        raise UsageError(misfit.what, why=misfit.why, fix=misfit.fix)
    job = job.with_recipe(
        length=length_of(shape, None if default_length else job.recipe.length, "--max_length"),
        attention="sdpa" if shape.eager_only else job.recipe.attention,
    )
    return Problem(
        *(shape, tapes, gpu, replace(job, model=model)),
        fixed_rows=True,
        ram_efficient=not config.is_fsdp or config.on("fsdp_cpu_ram_efficient_loading"),
    )


def _check_ranks(config: JobConfig, job: Job, machine: str) -> None:
    """Refuses GPUs that differ from those of the YAML."""
    described, number = machines.parse(machine)
    stated = config.number("num_machines") or 1
    if described.count * number != job.layout.ranks:
        raise UsageError(
            f"--gpus {machine} is {counted(described.count * number, 'GPU')}, the YAML has "
            f"{counted(job.layout.ranks, 'process', 'processes')}",
            why="each process drives one GPU",
            fix=f"--gpus {job.layout.ranks}x{described.accelerator}, or change num_processes",
        )
    if number != stated:
        raise UsageError(
            f"--gpus {machine} is {counted(number, 'machine')}, the YAML has num_machines: {stated}",
            why="the links between machines decide the speed",
            fix=f"--gpus {stated}x{job.layout.ranks // stated}x{described.accelerator}",
        )


def verdict(config: JobConfig, arguments: Mapping[str, Any], read_shape: ReadShape, machine: str = "") -> str:
    """That a job doesn't fit, with the nearest change that would, in a sentence; empty if it fits or is unknown.

    `machine` are its GPUs, by default those in the YAML's header. The model must be bundled, or in a folder here.
    """
    machine, model = machine or from_yaml.gpus_in_header(config), model_of(config, arguments)
    if not machine or not (catalogue.find(model) or Path(model).is_dir()):
        return ""
    try:
        problem = problem_of(config, from_yaml.predictable(config, arguments), model, machine, read_shape)
        plan = search.judge(problem)
    except UNKNOWN:
        return ""
    if plan.choice is not None:
        return ""
    (row,) = plan.rows
    why = row.refused or f"it needs {gib_of(row.device.needed, row.device.capacity)} on each {problem.gpu.name}"
    nearest = next(iter(remedies(problem, problem.job)), None)
    lead = "predicted to fit without the margin" if row.verdict == "tight" else "predicted not to fit"
    return f"{lead}: {why}" + (f"; what would fit: {nearest.words}" if nearest else "")
