"""Finds ranks whose copies of a model part during a run, by the weights around each step. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from accel_fsdp.rehearsal.records import Content, Records
from accel_fsdp.units import first_few

APART = 1e-5
"""The largest difference of a weight's sum on two ranks, relative to its norm: copies are equal to the last bit."""


@dataclass(frozen=True)
class Parted:
    """Two ranks that end with other values of `names`, which DistributedDataParallel keeps equal."""

    ranks: tuple[int, int]
    names: tuple[str, ...]
    unfrozen: tuple[str, ...]
    steps: Sequence[tuple[Content, Content]]

    @property
    def end(self) -> str:
        return f"ranks {self.ranks[0]} and {self.ranks[1]} end with different values of {first_few(self.names, 1)}"


def parted(records: Records) -> Parted | None:
    """The first ranks that part, both after the last step and at the end.

    None where the script combines the ranks' tensors itself. A rank may load weights after training, to evaluate them,
    or get others' after fewer batches.
    """
    of_ranks = {
        rank: {model["number"]: model for model in end["models"] if model["is_copy"]}
        for rank, end in records.ends.items()
    }
    if records.combines or not records.all_ended:
        return None
    (first, models), *others = sorted(of_ranks.items())
    for number, model in models.items():
        for rank, other in ((rank, models_of[number]) for rank, models_of in others if number in models_of):
            last, end = (_different(model[kind], other[kind]) for kind in ("last", "end"))
            if names := [name for name in end if name in last or name not in model["last"]]:
                pair = (copied_steps(records, r) for r in (first, rank))
                unfrozen = tuple(name for name in names if name in model["unfrozen"])
                return Parted((first, rank), tuple(names), unfrozen, list(zip(*pair, strict=False)))
    return None


def copied_steps(records: Records, rank: int) -> list[Content]:
    return [step for step in records.steps.get(rank, ()) if step["is_copy"]]


def _different(first: Content, other: Content) -> list[str]:
    pairs = ((name, *first[name], *other[name]) for name in first if name in other)
    return [name for name, total, norm, others, _ in pairs if abs(total - others) > APART * norm]


def unfrozen(records: Records) -> Content | None:
    """DDP averages gradients of the weights alone that needed some when it wrapped the model."""
    pair = parted(records)
    if pair is None or not pair.unfrozen:
        return None
    verb = "were" if len(pair.unfrozen) > 1 else "was"
    return {
        "names": f"{first_few(pair.unfrozen, 1)} {verb}",
        "line": records.ends[pair.ranks[0]]["lines"]["requires_grad"],
    }


def at_other_batches(records: Records) -> Content | None:
    """The first step that ranks take after different numbers of batches."""
    pair = parted(records)
    for number, steps in enumerate(pair.steps if pair else (), 1):
        if pair and steps[0]["backwards"] != steps[1]["backwards"]:
            batches = (
                f"{step['backwards']} batches on rank {rank}" for rank, step in zip(pair.ranks, steps, strict=True)
            )
            return {"step": number, "batches": " and ".join(batches), "end": pair.end, "line": pair.steps[0][0]["line"]}
    return None


def parting(records: Records) -> Content | None:
    """The first step at which the copies part, and how."""
    pair = parted(records)
    if pair is None:
        return None
    line = records.ends[pair.ranks[0]]["backward_line"]
    fix = "run forward through the prepared model and backward without no_sync; change gradients and steps on all "
    in_step = {"end": pair.end, "line": line, "fix": f"{fix}ranks alike"}
    for number, steps in enumerate(pair.steps, 1):
        if all("before" in step for step in steps) and not _near(*(step["before"] for step in steps)):
            if not _near(*(step["since"] for step in steps)):
                return {"what": f"step {number - 1} changes weights differently", **in_step}
            changed = [rank for rank, s in zip(pair.ranks, steps, strict=True) if s["since"] != s["before"]]
            who = f"rank {changed[0]} alone changes its weights" if len(changed) == 1 else "weights change differently"
            when = f"between steps {number - 1} and {number}" if number > 1 else "before the first step"
            loaded_at = steps[0]["loaded_at"] or steps[1]["loaded_at"]
            return {"what": f"{when} {who}", "end": pair.end, "line": loaded_at or line}
    return {"what": f"step {len(pair.steps)} changes weights differently", **in_step}


def _near(total: float | None, other: float | None) -> bool:
    return total == other or (None not in (total, other) and math.isclose(total or 0, other or 0, rel_tol=1e-9))
