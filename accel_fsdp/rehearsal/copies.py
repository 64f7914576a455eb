"""Finds ranks whose copies of a model part during a run, by the weights around each step. Pure."""

from accel_fsdp.rehearsal.records import Content, Records
from accel_fsdp.units import first_few

APART = 1e-5
"""The largest difference of a weight's sum on two ranks, relative to its norm: copies are equal to the last bit."""


def parted(records: Records) -> Content | None:
    """The first `ranks` that part, after the last step and at the end, and their `steps`.

    `unfrozen` are the differing weights that needed no gradients when DistributedDataParallel wrapped the model. None
    where the script combines the ranks' tensors itself. A rank may load weights after training, to evaluate them, or
    get others' after fewer batches.
    """
    if records.combines or not records.all_ended:
        return None
    (first, models), *others = (
        (rank, {model["number"]: model for model in end["models"] if model["is_copy"]})
        for rank, end in sorted(records.ends.items())
    )
    for number, model in models.items():
        for rank, other in ((rank, of_rank[number]) for rank, of_rank in others if number in of_rank):
            last, end = (_different(model[kind], other[kind]) for kind in ("last", "end"))
            if names := [name for name in end if name in last or name not in model["last"]]:
                steps = ([step for step in records.steps.get(r, ()) if step["is_copy"]] for r in (first, rank))
                return {
                    "ranks": (first, rank),
                    "steps": list(zip(*steps, strict=False)),
                    "end": f"ranks {first} and {rank} end with different values of {first_few(names, 1)}",
                    "unfrozen": [name for name in names if name in model["unfrozen"]],
                    "lines": records.ends[first]["lines"],
                    "line": records.ends[first]["backward_line"],
                }
    return None


def _different(first: Content, other: Content) -> list[str]:
    pairs = ((name, *first[name], *other[name]) for name in first if name in other)
    return [name for name, total, norm, others, _ in pairs if abs(total - others) > APART * norm]


def unfrozen(records: Records) -> Content | None:
    """DDP averages gradients of the weights alone that needed some when it wrapped the model."""
    pair = parted(records)
    if pair is None or not pair["unfrozen"]:
        return None
    verb = "were" if len(pair["unfrozen"]) > 1 else "was"
    return {"names": f"{first_few(pair['unfrozen'], 1)} {verb}", "line": pair["lines"]["requires_grad"]}


def at_other_batches(records: Records) -> Content | None:
    """The first step that ranks take after different numbers of batches."""
    pair = parted(records)
    for number, steps in enumerate(pair["steps"] if pair else (), 1):
        if pair and steps[0]["backwards"] != steps[1]["backwards"]:
            of_ranks = zip(pair["ranks"], steps, strict=True)
            batches = " and ".join(f"{step['backwards']} batches on rank {rank}" for rank, step in of_ranks)
            return {**pair, "step": number, "batches": batches, "line": steps[0]["line"]}
    return None


def parting(records: Records) -> Content | None:
    """Copies that part; often after one rank has loaded other weights."""
    pair = parted(records)
    for one, other in pair["steps"] if pair else ():
        if pair and bool(one["loaded_at"]) != bool(other["loaded_at"]):
            return {**pair, "line": one["loaded_at"] or other["loaded_at"]}
    return pair
