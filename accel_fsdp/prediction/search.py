"""Searches layouts and batches to train a model on given GPUs: keeps those that fit, ranks by predicted time. Pure."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from accel_fsdp.config import Engine
from accel_fsdp.job import Job, Layout
from accel_fsdp.prediction.problem import Candidate, Problem, layouts, offloads, rows_in
from accel_fsdp.prediction.speed import SHORTEST
from accel_fsdp.units import gib_of

MOST_ROWS = 256
"""Beyond this a larger micro-batch gains no speed on any GPU."""
MOST_TOKENS = 1 << 20
TIE = SHORTEST
"""Two candidates differ if one has less than this share of the other's speed; real steps may be that much shorter than
predicted."""
AMPLE, WORTH = 0.1, 0.8
"""Free memory, as a share of what is needed, that leaves room for what isn't predicted; it is preferred where it leaves
this share of the highest speed."""
ENOUGH = 0.95
"""The share of a strategy's highest speed that a micro-batch must reach: a larger one fills memory and gains little."""


def largest(problem: Problem, job: Job, field: str, most: int) -> int:
    """The largest value of a field of the recipe, such as its rows, that fits; 0 if none does."""

    def is_too_large(number: int) -> bool:
        return number > 0 and not problem.has_room(job.with_recipe(**{field: number}))

    powers = (2**power for power in range(most.bit_length()))
    above = next((power for power in powers if is_too_large(power)), most + 1)
    return bisect_left(range(above), True, lo=above // 2, key=is_too_large) - 1


@dataclass(frozen=True)
class Plan:
    """The table, the choice, and its reason. `choice` is None if nothing fits.

    `ties` are the best candidates of other layouts that are as fast as the choice, within the prediction's error;
    `runner_up` is the fastest slower one.
    """

    problem: Problem = field(repr=False)
    rows: tuple[Candidate, ...]
    choice: Candidate | None = None
    runner_up: Candidate | None = None
    ties: tuple[Candidate, ...] = ()
    reason: str = ""

    @cached_property
    def longest(self) -> int:
        """The tokens of the longest sequences that fit in the recommended micro-batch; found when first asked for."""
        limit = self.problem.shape.positions or MOST_TOKENS
        return largest(self.problem, self.choice.job, "length", limit) if self.choice else 0


def make_plan(problem: Problem) -> Plan:
    """Searches strategy, checkpointing, micro-batch and offload; chooses the simplest of the fastest that fit."""
    candidates = list(_search(problem, layouts(problem.job)))
    rows = tuple(problem.judged(job) for job in layouts(problem.job))
    choice = _choose(problem, candidates)
    if choice is None:
        return Plan(problem, rows)
    bests: dict[Layout, Candidate] = {choice.layout: choice}  # the fastest of each layout
    for candidate in sorted(candidates, key=lambda candidate: -candidate.tokens_per_s):
        bests.setdefault(candidate.layout, candidate)
    others = [candidate for candidate in bests.values() if candidate is not choice]
    fastest = max(candidate.tokens_per_s for candidate in bests.values())
    ties = tuple(candidate for candidate in others if candidate.tokens_per_s >= TIE * fastest)
    second = next((candidate for candidate in others if candidate not in ties), None)
    return Plan(problem, rows, choice, second, ties, _reason(problem, choice, alone=not ties))


def best(
    problem: Problem, jobs: Iterable[Job] | None = None, agrees: Callable[[Job], bool] = lambda job: True
) -> Candidate | None:
    """The choice of `make_plan`, or that among some layouts and of candidates that agree; None if nothing fits."""
    return _choose(problem, list(_search(problem, layouts(problem.job) if jobs is None else jobs, agrees)))


def least(problem: Problem, jobs: Iterable[Job], agrees: Callable[[Job], bool]) -> Candidate | None:
    """Of the candidates that agree, in these layouts and with the fewest rows, the one that needs least."""
    few = [variant.with_recipe(rows=variant.recipe.rows if problem.fixed_rows else 1) for variant in variants(jobs)]
    candidates = [problem.evaluate(variant) for variant in few if agrees(variant)]
    return min(candidates, key=lambda tried: (bool(tried.refused), tried.device.needed), default=None)


def judge(problem: Problem) -> Plan:
    """Judges the job of the problem as it is: whether it fits, and the largest micro-batch and sequence that do."""
    candidate = problem.judged(problem.job)
    if not candidate.fits:
        return Plan(problem, (candidate,))
    largest_rows = largest(problem, problem.job, "rows", MOST_ROWS)
    more = largest_rows > candidate.recipe.rows
    reason = f"; up to {rows_in(replace(candidate.recipe, rows=largest_rows))} would too" if more else ""
    return Plan(problem, (candidate,), candidate, reason=reason)


def _choose(problem: Problem, candidates: list[Candidate]) -> Candidate | None:
    """The simplest of the fastest candidates, if possible one with ample room; None without any."""
    choice = _simplest(candidates)
    if choice is None:
        return None
    limit = WORTH * max(candidate.tokens_per_s for candidate in candidates)
    fast = [candidate for candidate in candidates if candidate.tokens_per_s >= limit]
    ample = [candidate for candidate in fast if _has_ample_room(problem, candidate.job)]
    return _simplest([candidate for candidate in ample if _burden(candidate)[:2] <= _burden(choice)[:2]]) or choice


def _simplest(candidates: list[Candidate]) -> Candidate | None:
    """The candidate with the least burden of those about as fast as the fastest; None without any."""
    limit = TIE * max((candidate.tokens_per_s for candidate in candidates), default=0)
    return min((candidate for candidate in candidates if candidate.tokens_per_s >= limit), key=_burden, default=None)


def _has_ample_room(problem: Problem, job: Job) -> bool:
    device = problem.device(job)
    return device.needed * (1 + AMPLE) <= device.capacity


def _search(
    problem: Problem, jobs: Iterable[Job], agrees: Callable[[Job], bool] = lambda job: True
) -> Iterator[Candidate]:
    """Yields the best micro-batches of each layout and checkpointing that works, agrees and fits.

    Offload is tried only if nothing fits without it.
    """
    done: tuple[Layout, str] | None = None
    for variant in variants(jobs):
        place = replace(variant.layout, offload=False), variant.recipe.checkpointing
        if place == done or not agrees(variant):
            continue
        for candidate in _best(problem, variant):
            done = place
            yield candidate


def variants(jobs: Iterable[Job]) -> Iterator[Job]:
    """Each job as it is and with checkpointing, each of them without offload and with it."""
    for job in jobs:
        for kind in dict.fromkeys((job.recipe.checkpointing, "full")):
            yield from offloads(job.with_recipe(checkpointing=kind))


def _best(problem: Problem, job: Job) -> Iterator[Candidate]:
    """The smallest micro-batch that is about as fast as the fastest that fits, and as the fastest with ample room."""
    if problem.refuses(job) or not problem.is_hosted(job):
        return
    batches = _batches(problem, job)
    ample = [batch for batch in batches if _has_ample_room(problem, batch)]
    speeds = {batch: problem.step(batch).tokens_per_s_per_gpu for batch in batches}
    for some in (batches, ample):
        fastest = max((speeds[batch] for batch in some), default=0)
        fast = (batch for batch in some if speeds[batch] >= ENOUGH * fastest)
        if batch := next(fast, None):
            yield problem.evaluate(batch)


def _batches(problem: Problem, job: Job) -> list[Job]:
    """The micro-batches that fit, of those worth trying, smallest first."""
    if problem.fixed_rows or problem.global_rows:
        batches = [job] if problem.fixed_rows else _split(problem, job)
        return [batch for batch in batches if problem.has_room(batch)]
    largest_rows = largest(problem, job, "rows", MOST_ROWS)
    powers = [2**power for power in range(largest_rows.bit_length())]
    return [job.with_recipe(rows=rows) for rows in dict.fromkeys((*powers, *([largest_rows] if largest_rows else [])))]


def _split(problem: Problem, job: Job) -> list[Job]:
    """The micro-batches that a global batch can be split into, smallest first."""
    rows = job.layout.rows_of_each(problem.global_rows)
    sizes = (size for size in range(1, min(rows, MOST_ROWS) + 1) if rows % size == 0)
    return [job.with_recipe(rows=size, accumulation=rows // size) for size in sizes]


PREFERRED = "Among equals a plan prefers no offload, then DDP and FSDP2, then no checkpointing, then more free memory."
OLDER = {Engine.FSDP1: 1, Engine.DEEPSPEED: 2}


def _burden(candidate: Candidate) -> tuple[bool, int, bool, int]:
    """The candidate's value for each criterion of `PREFERRED`; lower is better."""
    layout, older = candidate.layout, OLDER.get(candidate.layout.engine, 0)
    return layout.offload, older, candidate.recipe.recomputes, candidate.device.needed


def _reason(problem: Problem, choice: Candidate, alone: bool) -> str:
    step = problem.step(choice.job)
    contest = "It is the fastest layout that fits" if alone else "No other is faster by more than the error"
    return (
        f"{'It fits' if choice.layout.engine is Engine.NONE else contest}: "
        f"{gib_of(choice.device.needed, problem.capacity_bytes)} at its peak, "
        f"about {step.tokens_per_s_per_gpu:,.0f} tokens/s per GPU, bound by {step.bound}."
    )
