"""The cost of a job: steps, hours, energy, money, checkpoints; as ranges, because a step's time is a range. Pure."""

import math
from dataclasses import dataclass

from accel_fsdp.hardware import Gpu
from accel_fsdp.job import Event, Job, Layout, Schedule
from accel_fsdp.prediction.amounts import Amounts
from accel_fsdp.prediction.speed import RANGE, Step

HOUR = 3600


@dataclass(frozen=True)
class Span(Amounts):
    """A predicted amount with its minimum and maximum; spans can be added and multiplied."""

    expected: float
    least: float
    most: float


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


def work_of(schedule: Schedule, rows: int = 0) -> Work:
    """The amount that a script's arguments train; epochs need the `rows` of the data set."""
    return Work(steps=schedule.max_steps, rows=rows, epochs=schedule.epochs)


def seconds_of(steps: int, step: Step) -> Span:
    """The duration of a number of steps."""
    return Span(step.step_seconds, *step.range_seconds).times(steps)


def events(kind: Event, every: float, steps: int, per_epoch: float) -> int:
    """The number of saves or evaluations in a run of `steps`, including one at its end; `best` saves at least once."""
    after = {"steps": every if every >= 1 else math.ceil(every * steps), "epoch": per_epoch, "best": steps}.get(kind)
    return math.ceil(steps / max(after, 1)) if after else 0


def at_once(saves: int, kept: int, there: int = 0) -> int:
    """The largest number of further checkpoints on the disk, besides the complete ones that are `there`.

    The newest is written before the oldest is deleted. `kept` 0 keeps all.
    """
    return min(saves, max(kept + 1 - there, 1)) if kept > 0 else saves


@dataclass(frozen=True)
class Saves:
    """The checkpoints of a run: how many are written, how many are on the disk at once, and the bytes of one.

    `stall_seconds` is how long training waits for one of them, None if the disk's speed is unknown.
    """

    count: int
    at_once: int
    each_bytes: int
    stall_seconds: Span | None

    @property
    def disk_bytes(self) -> int:
        """The most bytes on the disk at once."""
        return self.at_once * self.each_bytes


@dataclass(frozen=True)
class Evaluations:
    """The evaluations of a run: their number, and the seconds of each; None if unknown."""

    count: int | None
    each_seconds: Span | None


@dataclass(frozen=True)
class CostInputs:
    """The inputs of a job's cost besides the job.

    `price` is that of one GPU for an hour, None if unknown. Without `schedule` checkpoints cost nothing.
    """

    work: Work
    price: float | None = None
    schedule: Schedule | None = None
    disk_bytes_per_s: float = 0
    evaluation_rows: int = 0


@dataclass(frozen=True)
class Cost:
    """The cost of a job. `hours` are those of training with all saves and evaluations whose duration is known.

    `most_kwh` is the boards' energy at full power for the longest of these hours. `saves` None: unknown.
    """

    steps: int
    tokens: int
    hours: Span
    gpu_hours: Span
    most_kwh: float
    price: float | None
    saves: Saves | None
    evaluations: Evaluations | None

    @property
    def money(self) -> Span | None:
        return None if self.price is None else self.gpu_hours.times(self.price)


def cost(
    inputs: CostInputs, job: Job, step: Step, gpu: Gpu, checkpoint_bytes: int = 0, forward_seconds: float = 0
) -> Cost | None:
    """The cost of a job; None if the number of its steps is unknown.

    `forward_seconds` are those of one evaluation batch.
    """
    steps = inputs.work.steps_of(job)
    if not steps:
        return None
    seconds = seconds_of(steps, step)
    saves = evaluations = None
    if inputs.schedule:
        per_epoch = steps_per_epoch(inputs.work.rows, job)
        saves = _saves(inputs, inputs.schedule, steps, per_epoch, checkpoint_bytes, job.layout)
        per_evaluation = _evaluation_seconds(inputs.evaluation_rows, job, forward_seconds)
        evaluations = Evaluations(evaluations_in(inputs.schedule, steps, per_epoch), per_evaluation)
        if saves and saves.stall_seconds:
            seconds += saves.stall_seconds.times(saves.count)
        if per_evaluation and evaluations.count:
            seconds += per_evaluation.times(evaluations.count)
    hours, ranks = seconds.times(1 / HOUR), job.layout.ranks
    return Cost(
        steps=steps,
        tokens=steps * job.rows_per_step * job.recipe.length,
        hours=hours,
        gpu_hours=hours.times(ranks),
        most_kwh=hours.most * ranks * gpu.board_watts / 1000,
        price=inputs.price,
        saves=saves,
        evaluations=evaluations,
    )


def _saves(
    inputs: CostInputs, schedule: Schedule, steps: int, per_epoch: int, size: int, layout: Layout
) -> Saves | None:
    """The checkpoints of a run; None if their number is unknown.

    At best each machine writes at the disk's full speed; at worst, which is the expected case, they share it.
    """
    if schedule.saves == "epoch" and not per_epoch:
        return None
    count = events(schedule.saves, schedule.save_steps, steps, per_epoch)
    writers = max(layout.ranks // layout.ranks_per_node, 1)
    longest = size / inputs.disk_bytes_per_s if inputs.disk_bytes_per_s else 0
    wait = Span(longest, longest / writers, longest) if longest else None
    return Saves(count, at_once(count, schedule.kept), size, wait)


def _evaluation_seconds(rows: int, job: Job, forward_seconds: float) -> Span | None:
    """The seconds of one evaluation, where a batch takes `forward_seconds`; None if unknown."""
    if not rows or not job.recipe.eval_batch:
        return None
    batches = job.layout.batches(rows, job.recipe.eval_batch)
    return Span(1, *RANGE).times(batches * forward_seconds)


def evaluations_in(schedule: Schedule, steps: int, per_epoch: int) -> int | None:
    """The number of evaluations of a run; None if unknown."""
    interval = {"steps": schedule.eval_steps, "epoch": per_epoch}.get(schedule.evaluates, 1)
    if not interval:
        return None
    return events(schedule.evaluates, interval, steps, per_epoch) + schedule.eval_on_start
