"""The plan's advice on one strategy before a YAML is written: switches to turn on so that it fits, and the verdict.

Pure. It needs no torch for the models of the catalogue, and milliseconds.
"""

from collections.abc import Mapping
from typing import Literal

from accel_fsdp.config import Method, Precision
from accel_fsdp.hardware import MachineFacts, gpus
from accel_fsdp.job import SHARDING_KINDS, Job, Layout, Recipe
from accel_fsdp.prediction import trace_store
from accel_fsdp.prediction.memory import ModelShape, Tapes, Variant
from accel_fsdp.prediction.problem import Candidate, Problem, length_of

Known = tuple[ModelShape, Mapping[str, Tapes]]


def problem_of(
    model: str,
    machine: MachineFacts,
    layout: Layout,
    method: Method = "full",
    precision: Precision = "bf16",
    known: Known | None = None,
    seq_len: int | None = None,
) -> Problem | None:
    """A job with one row of `seq_len` tokens per GPU (see `length_of`); None if model or GPU is unknown.

    `known` is the shape and the tapes of a model outside the catalogue (`tracing.read_shape`), which take seconds.

    Raises:
        UsageError: the model has fewer positions than `seq_len`.
    """
    recorded = known or trace_store.find(model)
    if recorded is None or machine.accelerator is None or not gpus.is_known(machine.accelerator):
        return None
    shape, tapes = recorded
    if known is None and not any(Variant.of(variant).method == method for variant in tapes):
        return None
    dtype: Literal["float32", "bfloat16"] = "float32" if method == "full" else "bfloat16"
    recipe = Recipe(method, precision, dtype, length=length_of(shape, seq_len))
    return Problem(shape, tapes, gpus.find(machine.accelerator, machine.memory_gib), Job(layout, recipe))


def advise(problem: Problem) -> Candidate:
    """The first candidate of the problem's layout that fits, or the smallest if none does.

    The order: neither checkpointing nor offload, checkpointing, checkpointing with offload.
    """
    light = problem.job.with_layout(offload=False)
    full = light.with_recipe(checkpointing="full")
    offloaded = [full.with_layout(offload=True)] if light.engine in SHARDING_KINDS else []
    candidates: list[Candidate] = []
    for job in (light, full, *offloaded):
        candidates.append(problem.evaluate(job))
        if candidates[-1].fits:
            return candidates[-1]
    return min(candidates, key=lambda candidate: candidate.device.needed)
