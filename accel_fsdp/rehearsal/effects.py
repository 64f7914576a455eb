"""Finds weights that no optimizer trains, hidden NaN, and lasting evaluation mode, in any step of a run. Pure."""

from collections.abc import Iterator, Sequence

from accel_fsdp.launch.ranks import RankEvent
from accel_fsdp.rehearsal import repeated
from accel_fsdp.rehearsal.blame import SCRIPT, Failure

ROW = 3
"""The last backward passes without a gradient that show a mistake; a single batch may have no labels."""


def mistakes(events: Sequence[RankEvent]) -> Iterator[Failure]:
    yield from _hidden_nan(events)
    yield from _in_no_optimizer(events)
    yield from _evaluating(events)


def _evaluating(events: Sequence[RankEvent]) -> Iterator[Failure]:
    """Models that began in training mode, and train in evaluation mode to the end."""
    event = next((event for event in events if event.kind == "evaluates-on"), None)
    if event:
        since, steps = event.content["since"], event.content["steps"]
        what = f"steps {since} to {steps} train in evaluation mode, without dropout, and those before in training mode"
        yield Failure(what, SCRIPT, "model.train() after each evaluation", event.content["line"])


def _hidden_nan(events: Sequence[RankEvent]) -> Iterator[Failure]:
    """NaN in some batches may be meant, as without labels; not to the end, or in half of them."""
    for rank, content in ((event.rank, event.content) for event in events if event.kind == "hidden-nan"):
        passes, hidden = content["passes"], content["hidden"]
        if content["in_a_row"] >= ROW or (hidden > 1 and hidden >= passes / 2):
            by, where = content["by"], f"in {hidden} of {passes} backward passes of rank {rank}"
            fix = "see what makes it NaN, such as labels that are all -100, and skip such batches"
            if by == "nan_to_num":
                what = f"the loss is NaN or infinite {where}, and nan_to_num hides it: they give no gradient"
                fix += "; leave nan_to_num out"
            else:
                what = f"{by or 'the script'} replaces the loss by a number {where}: they give no gradient"
            yield Failure(what, SCRIPT, fix, content["line"])
            return


def _in_no_optimizer(events: Sequence[RankEvent]) -> Iterator[Failure]:
    """Weights that are unfrozen later, or get gradients later, while more weights are trained."""
    reports = [event.content for event in events if event.kind == "uncovered"]
    at_first = {name for event in events if event.kind == "repeated" for name in event.content["uncovered"]}
    trained = {name for report in reports for name in report["trained"]} | at_first
    kept = {name for report in reports for name in report["kept"]} - trained
    thawed = sorted(kept.intersection(*(report["thawed"] for report in reports)))
    left = thawed or sorted(kept)
    if not thawed and (not left or len(left) >= reports[0]["count"] / 2):
        return
    fix = "optimizer.add_param_group with the unfreezing; or give all weights to the optimizer, which skips frozen ones"
    yield repeated.untrained(left, ", unfrozen after the first step" if thawed else "", fix, events)
