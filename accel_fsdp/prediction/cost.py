"""The cost of a job: steps, hours and money. Pure."""

import math
from dataclasses import dataclass

from accel_fsdp.job import Job
from accel_fsdp.prediction.speed import Step

HOUR = 3600
Range = tuple[float, float]
"""The least and the most of a predicted amount."""


@dataclass(frozen=True)
class Work:
    """The amount that a job trains: steps, tokens, or rows times epochs; the first of these above zero."""

    steps: int = 0
    tokens: int = 0
    rows: int = 0
    epochs: float = 1

    def steps_of(self, job: Job) -> int:
        """The optimizer steps, 0 if unknown; the last one counts as full."""
        if self.steps:
            return self.steps
        if self.tokens:
            return -(-self.tokens // (job.rows_per_step * job.recipe.length))
        return math.ceil(self.epochs * steps_per_epoch(self.rows, job)) if self.rows else 0


def steps_per_epoch(rows: int, job: Job) -> int:
    """The steps of an epoch as Trainer counts them: each rank has as many micro-batches; the last step may be short."""
    batches = job.layout.batches(rows, job.recipe.rows)
    return -(-batches // job.recipe.accumulation)


@dataclass(frozen=True)
class Cost:
    """The cost of training alone. `price` is that of one GPU for an hour, None if unknown."""

    steps: int
    tokens: int
    ranks: int
    hours: Range
    price: float | None

    @property
    def gpu_hours(self) -> Range:
        return self.hours[0] * self.ranks, self.hours[1] * self.ranks

    @property
    def money(self) -> Range | None:
        return None if self.price is None else (self.gpu_hours[0] * self.price, self.gpu_hours[1] * self.price)


def cost(work: Work, job: Job, step: Step | None, price: float | None = None) -> Cost | None:
    """The cost of a job; None if the number of its steps, or their time, is unknown."""
    steps = work.steps_of(job)
    if not steps or step is None:
        return None
    shortest, longest = step.range_seconds
    hours = steps * shortest / HOUR, steps * longest / HOUR
    return Cost(steps, steps * job.rows_per_step * job.recipe.length, job.layout.ranks, hours, price)
