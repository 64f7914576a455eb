"""The plan's advice on one strategy before a YAML is written: switches to turn on so that it fits, and the verdict.

Pure. It needs no torch for the models of the catalogue, and milliseconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from accel_fsdp.config import Method, Precision
from accel_fsdp.hardware import MachineFacts, gpus
from accel_fsdp.job import SHARDING_KINDS, Layout, Recipe
from accel_fsdp.prediction import trace_store
from accel_fsdp.prediction.capacity import Verdict
from accel_fsdp.prediction.memory import ModelShape, Tapes
from accel_fsdp.prediction.search import Candidate, PlanJob, evaluate
from accel_fsdp.units import GIB, gib_of

LENGTH = 2048
"""Tokens per row for judging a YAML, which has no length; fewer if the model has fewer positions."""
Known = tuple[ModelShape, Mapping[str, Tapes]]


@dataclass(frozen=True)
class Advice:
    """The lightest candidate of one strategy that fits, or the smallest if none does."""

    chosen: Candidate
    capacity_gib: float

    @property
    def checkpointing(self) -> bool:
        """Whether to checkpoint activations."""
        return self.chosen.recipe.recomputes

    @property
    def offload(self) -> bool:
        """Whether to offload to the host's memory."""
        return self.chosen.layout.offload

    @property
    def fits(self) -> bool:
        """Whether it fits with the margin, as `accel-fsdp plan --config` judges it."""
        return self.chosen.fits

    @property
    def verdict(self) -> Verdict:
        """As in the table of `accel-fsdp plan`."""
        return self.chosen.device.verdict

    @property
    def words(self) -> str:
        """Such as: needs 63.7 of 39.4 GiB with 1 x 2,048 tokens per GPU."""
        recipe = self.chosen.recipe
        memory = gib_of(self.chosen.device.needed, self.capacity_gib * GIB)
        return f"needs {memory} with {recipe.rows} x {recipe.length:,} tokens per GPU"


def make_job(
    model: str,
    machine: MachineFacts,
    layout: Layout,
    method: Method = "full",
    precision: Precision = "bf16",
    known: Known | None = None,
) -> PlanJob | None:
    """A job with one row of at most `LENGTH` tokens per GPU; None if model or GPU is unknown.

    `known` is the shape and the tapes of a model outside the catalogue (`tracing.read_shape`), which take seconds.
    """
    recorded = known or trace_store.find(model)
    if recorded is None or machine.accelerator is None or not gpus.is_known(machine.accelerator):
        return None
    shape, tapes = recorded
    gpu = gpus.find(machine.accelerator, machine.memory_gib)
    dtype: Literal["float32", "bfloat16"] = "float32" if method == "full" else "bfloat16"
    recipe = Recipe(method, precision, dtype, length=min(LENGTH, shape.positions or LENGTH))
    return PlanJob(shape, tapes, recipe, gpu, layout.ranks, layout.ranks_per_node)


def advise(
    model: str,
    machine: MachineFacts,
    layout: Layout,
    method: Method = "full",
    precision: Precision = "bf16",
    known: Known | None = None,
) -> Advice | None:
    """The switches to turn on for `layout`, whose own offload is ignored; None as in `make_job`.

    Tried in this order: nothing, checkpointing, offload with checkpointing.
    """
    job = make_job(model, machine, layout, method, precision, known)
    if job is None:
        return None
    full = replace(job.recipe, checkpointing="full")
    tried = [(job.recipe, False), (full, False), *([(full, True)] if can_offload(layout) else [])]
    ways = [evaluate(job, recipe, replace(layout, offload=offload)) for recipe, offload in tried]
    chosen = next((way for way in ways if way.fits), min(ways, key=lambda way: way.device.needed))
    return Advice(chosen, job.gpu.usable_gib)


def judge(job: PlanJob, layout: Layout, checkpointing: bool) -> Advice:
    """Judges the job exactly as given."""
    recipe = replace(job.recipe, checkpointing="full" if checkpointing else "none")
    return Advice(evaluate(job, recipe, layout), job.gpu.usable_gib)


def can_offload(layout: Layout) -> bool:
    """Whether Accelerate can offload the shards of this layout."""
    return layout.engine in SHARDING_KINDS
