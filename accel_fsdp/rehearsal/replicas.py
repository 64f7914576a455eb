"""Finds ranks whose copies of a model part during a run, by the weights around each step. Pure."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accel_fsdp.ranks import RankEvent
from accel_fsdp.rehearsal.blame import Failure, mistake
from accel_fsdp.units import first_few

APART = 1e-5
"""The largest difference of a weight's sum on two ranks, relative to its norm: copies are equal to the last bit."""


@dataclass(frozen=True)
class Parted:
    """Two ranks that end with other values of `names`, which DistributedDataParallel keeps equal."""

    ranks: tuple[int, int]
    names: tuple[str, ...]
    content: Mapping[str, Any]

    @property
    def line(self) -> str:
        return str(self.content["backward_line"])

    @property
    def end(self) -> str:
        return f"ranks {self.ranks[0]} and {self.ranks[1]} end with different values of {first_few(self.names, 1)}"


def parted(events: Sequence[RankEvent]) -> Parted | None:
    """The first ranks that part, both after the last step and at the end.

    None where the script combines the ranks' tensors itself. A rank may load weights after training, to evaluate them,
    or get others' after fewer batches.
    """
    ranks = {event.rank for event in events if event.kind == "began"}
    if any(event.kind == "combines" for event in events):
        return None
    copies: dict[int, dict[int, Mapping[str, Any]]] = {}
    for event in events:
        if event.kind == "copies":
            copies.setdefault(event.content["number"], {})[event.rank] = event.content
    for reports in (reports for _, reports in sorted(copies.items()) if reports.keys() == ranks):
        first, *others = sorted(reports)
        for rank in others:
            ends = [_different(reports[first], reports[rank], kind) for kind in ("last", "end")]
            if names := [name for name in ends[1] if name in ends[0] or name not in reports[first]["last"]]:
                return Parted((first, rank), tuple(names), reports[first])
    return None


def _different(first: Mapping[str, Any], other: Mapping[str, Any], kind: str) -> list[str]:
    pairs = ((name, *first[kind][name], *other[kind][name]) for name in first[kind] if name in other[kind])
    return [name for name, total, norm, others, _ in pairs if abs(total - others) > APART * norm]


def unfrozen(events: Sequence[RankEvent]) -> Iterator[Failure]:
    """DDP averages gradients of the weights alone that needed some when it wrapped the model."""
    pair = parted(events)
    if names := [name for name in pair.names if name in pair.content["unfrozen"]] if pair else []:
        verb = "were" if len(names) > 1 else "was"
        yield mistake(
            f"{first_few(names, 1)} {verb} frozen when DistributedDataParallel wrapped the model: unfrozen later, "
            "gradients are not averaged over ranks",
            "freeze after prepare, with find_unused_parameters=True in DistributedDataParallelKwargs; or wrap the "
            "model again after unfreezing",
            pair.content["unfrozen_at"] if pair else "",
        )


def at_other_batches(events: Sequence[RankEvent]) -> Iterator[Failure]:
    """The first step that ranks take after different numbers of batches."""
    if (pair := parted(events)) is None:
        return
    first, other = pair.ranks
    steps = zip(_steps(events, first), _steps(events, other), strict=False)
    for step, (one, two) in enumerate(steps, 1):
        if one["backwards"] != two["backwards"]:
            batches = f"{one['backwards']} batches on rank {first} and {two['backwards']} on rank {other}"
            what = f"the ranks step at different batches: step {step} comes after {batches}; {pair.end}"
            fix = "decide on all ranks alike whether to step: by a loss that is reduced over ranks"
            yield mistake(what, fix, _first_step(events, first))
            return


def mistakes(events: Sequence[RankEvent]) -> Iterator[Failure]:
    """The first step at which the copies part, and how."""
    if (pair := parted(events)) is None:
        return
    reports = [_steps(events, rank) for rank in pair.ranks]
    for step, (one, two) in enumerate(zip(*reports, strict=False), 1):
        if "before" not in one or "before" not in two or _near(one["before"], two["before"]):
            continue
        yield _between(pair, step, one, two) if _near(one["since"], two["since"]) else _in_step(pair, step - 1)
        return
    yield _in_step(pair, len(reports[0]))


def _between(pair: Parted, step: int, one: Mapping[str, Any], two: Mapping[str, Any]) -> Failure:
    changed = [rank for rank, now in zip(pair.ranks, (one, two), strict=True) if now["since"] != now["before"]]
    who = f"rank {changed[0]} alone changes its weights" if len(changed) == 1 else "weights change differently"
    when = f"between steps {step - 1} and {step}" if step > 1 else "before the first step"
    fix = "change weights on all ranks in the same way"
    return mistake(f"{when} {who}: {pair.end}", fix, one["loaded_at"] or two["loaded_at"] or pair.line)


def _in_step(pair: Parted, step: int) -> Failure:
    fix = (
        "run forward through the prepared model and backward without no_sync; change gradients and steps on all ranks "
        "alike"
    )
    return mistake(f"step {step} changes weights differently: {pair.end}", fix, pair.line)


def _near(total: float | None, other: float | None) -> bool:
    return total == other or (None not in (total, other) and math.isclose(total or 0, other or 0, rel_tol=1e-9))


def _steps(events: Sequence[RankEvent], rank: int) -> list[Mapping[str, Any]]:
    reports = (event.content for event in events if event.kind == "settings" and event.rank == rank)
    return [content for content in reports if "backwards" in content]


def _first_step(events: Sequence[RankEvent], rank: int) -> str:
    lines = (event.content["line"] for event in events if event.kind == "first-step" and event.rank == rank)
    return next(lines, "")
