"""The cost of a job: steps, hours and money. Pure."""

from dataclasses import dataclass

from accel_fsdp.job import Job
from accel_fsdp.prediction.speed import Step

HOUR = 3600
Range = tuple[float, float]
"""The least and the most of a predicted amount."""


@dataclass(frozen=True)
class Work:
    """The amount that a job trains: tokens, or without them steps."""

    tokens: int = 0
    steps: int = 0

    def steps_of(self, job: Job) -> int:
        """The optimizer steps, 0 if unknown; the last one counts as full."""
        return -(-self.tokens // (job.rows_per_step * job.recipe.length)) if self.tokens else self.steps


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
