"""Finds weights that no optimizer trains, wrong rates, hidden NaN, and lasting evaluation mode, in any step. Pure."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from accel_fsdp.ranks import RankEvent
from accel_fsdp.rehearsal import repeated
from accel_fsdp.rehearsal.blame import Failure, mistake
from accel_fsdp.units import counted, first_few

ROW = 3
"""The last backward passes without a gradient that show a mistake; a single batch may have no labels."""
IDLE = 0.25
"""The share of the steps that may have a rate of 0 at the end, after others had one."""
RISEN = 0.25
"""The part of a cosine's height to which the rate may rise after its end: a last batch may be filled for all ranks."""
FIX = (
    "scheduler.step() once per step of the optimizer, for as many as there are; a scheduler that Accelerate prepared "
    "moves num_processes times in each, so give it num_processes times as many"
)


def mistakes(events: Sequence[RankEvent]) -> Iterator[Failure]:
    yield from _of_schedules(events)
    yield from _hidden_nan(events)
    yield from _in_no_optimizer(events)
    for kind, text in REPORTED.items():
        yield from [text.about(event.content) for event in events if event.kind == kind][:1]
    yield from _left_over(events)


REPORTED: Mapping[str, repeated.Text] = {
    # models that began in training mode
    "evaluates-on": repeated.Text(
        "steps {since} to {steps} train in evaluation mode, without dropout, and those before in training mode",
        "model.train() after each evaluation",
    ),
    # groups by dimensions that FSDP1's shards do not have: weights that should decay do not
    "flat-groups": repeated.Text(
        "all {count} weights have a weight_decay of {decay:g}: groups by dimensions, and FSDP1's shards have 1",
        "make the groups and the optimizer before prepare, and prepare both in one call; or choose by name",
    ),
    "lost-hook": repeated.Text(
        "register_hook: FSDP replaces the weight by a shard and never calls the hook, which changes gradients",
        "change the gradients between backward and optimizer.step(); or freeze the weight, which needs no hook",
    ),
}
"""Mistakes that a rank reports itself, by the kind of its event."""


def _left_over(events: Sequence[RankEvent]) -> Iterator[Failure]:
    event = next((event for event in events if event.kind == "left-over"), None)
    if event:
        passes, usual = event.content["passes"], counted(event.content["usual"], "batch", "batches")
        yield mistake(
            f"no step comes after the last batch of an epoch of rank {event.rank}: the next epoch's first step has the "
            f"gradients of {passes} batches, and other steps those of {usual}",
            "a step at the last batch too, as with accelerator.accumulate(model): len(loader) is that of the prepared "
            "loader, which has only this rank's batches; or zero_grad() at the end of an epoch",
            event.content["line"],
        )


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
            yield mistake(what, fix, content["line"])
            return


def _in_no_optimizer(events: Sequence[RankEvent]) -> Iterator[Failure]:
    """Weights that get gradients and never change, while more weights do, unlike in a script that trains only a head.

    Or weights that are unfrozen later. Those that join an optimizer later, or that the script changes, don't count.
    """
    reports = [event.content for event in events if event.kind == "uncovered"]
    trained = {name for report in reports for name in report["trained"]}
    kept = {name for report in reports for name in report["kept"]} - trained
    thawed = sorted(kept.intersection(*(report["thawed"] for report in reports)))
    left = thawed or sorted(kept)
    if not thawed and (not left or len(left) >= reports[0]["count"] / 2):
        return
    verb = "have gradients and never change" if len(left) > 1 else "has gradients and never changes"
    what = f"no optimizer has {first_few(left, 1)}, which {verb}"
    line = next((c["line"] for c in (e.content for e in events if e.kind == "optimizer") if c["line"]), "")
    fix = "give them to the optimizer, as AdamW(model.parameters()) does; or requires_grad_(False) for them"
    added_at, strange = reports[0]["added_at"], reports[0]["strange"]
    if thawed:
        what += ", unfrozen after the first step"
        fix = "optimizer.add_param_group with the unfreezing; or all weights to the optimizer, which skips frozen ones"
    if thawed and added_at and strange:
        what += f": {counted(strange, 'weight')} that add_param_group added belong to no prepared model"
        fix, line = "add_param_group with the prepared model's parameters, not those from before prepare", added_at
    yield mistake(what, fix, line)


def _of_schedules(events: Sequence[RankEvent]) -> Iterator[Failure]:
    """Yields the mistakes of the first rank's schedules."""
    content = next((event.content for event in events if event.kind == "schedules"), None)
    if content is None:
        return
    for line in content["astray"][:1]:
        what = "a scheduler changes the rate of an optimizer that never steps, while another one steps"
        yield mistake(what, "make the scheduler of the optimizer that steps, after it", line)
    trained, idle = content["trained"], content["idle"]
    if trained and idle > 1 and idle >= IDLE * (trained + idle):
        what = f"the learning rate is 0 in the last {idle} of {counted(trained + idle, 'step')}"
        if content["moves"] > trained + idle:
            what += f": the scheduler moved {content['moves']} times"
        yield mistake(what, FIX, content["line"])
    steps, planned = trained + idle, content["planned"]
    if abs(planned - steps) <= 1 and content["moves"] >= 2 * steps > 2:
        what = f"the learning rate's schedule for {counted(planned, 'step')} has moved {content['moves']} times"
        yield mistake(f"{what}: with each micro-batch, not with each step", FIX, content["line"])
        return
    risen = content["risen"]
    if risen["share"] > RISEN:
        what = f"the learning rate rises again: a cosine of {risen['length']} moves has moved {risen['moves']} times"
        yield mistake(what, FIX, content["risen_at"])
    yield from _unfinished(content, events)


def _unfinished(content: Mapping[str, Any], events: Sequence[RankEvent]) -> Iterator[Failure]:
    """A schedule for the batches of all ranks, in a run that ends with an epoch and moved it for those of one rank."""
    (of_all, of_rank), planned, moves = content["batches"], content["planned"], content["moves"]
    passes = sum(event.kind == "loss" and event.rank == 0 for event in events)
    micro_batches = max(1, round(passes / max(1, content["trained"] + content["idle"])))
    epochs, rest = divmod(moves, math.ceil(of_rank / micro_batches) or 1)
    per_epoch = {of_all, of_all // micro_batches, math.ceil(of_all / micro_batches)}
    lengths = {epochs * batches for batches in per_epoch} | {epochs * of_all // micro_batches}
    if of_rank < of_all and moves and not rest and planned in lengths and planned > moves:
        what = (
            f"the learning rate's schedule ends after {moves} of {planned} moves: it was made for epochs of "
            f"{counted(of_all, 'batch', 'batches')}, and each rank has {of_rank} of them"
        )
        fix = "accelerator.prepare(scheduler), which moves it num_processes times in each step; or len(loader) after it"
        yield mistake(what, fix, content["made_at"])
