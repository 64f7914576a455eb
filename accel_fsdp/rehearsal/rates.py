"""Finds learning rates that end too early or rise again, and schedulers of an optimizer that never steps. Pure."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from accel_fsdp.launch.ranks import RankEvent
from accel_fsdp.rehearsal.blame import SCRIPT, Failure
from accel_fsdp.units import counted

IDLE = 0.25
"""The share of the steps that may have a rate of 0 at the end, after others had one."""
RISEN = 0.25
"""The part of a cosine's height to which the rate may rise after its end: a last batch may be filled for all ranks."""
FIX = (
    "scheduler.step() once per step of the optimizer, for as many as there are; a scheduler that Accelerate prepared "
    "moves num_processes times in each, so give it num_processes times as many"
)


def mistakes(events: Sequence[RankEvent]) -> Iterator[Failure]:
    """Yields the mistakes of the first rank's schedules."""
    content = next((event.content for event in events if event.kind == "schedules"), None)
    if content is None:
        return
    for line in content["astray"][:1]:
        what = "a scheduler changes the rate of an optimizer that never steps, while another one steps"
        yield Failure(what, SCRIPT, "make the scheduler of the optimizer that steps, after it", line)
    trained, idle = content["trained"], content["idle"]
    if trained and idle > 1 and idle >= IDLE * (trained + idle):
        what = f"the learning rate is 0 in the last {idle} of {counted(trained + idle, 'step')}"
        if content["moves"] > trained + idle:
            what += f": the scheduler moved {content['moves']} times"
        yield Failure(what, SCRIPT, FIX, content["line"])
    risen = content["risen"]
    if risen["share"] > RISEN:
        what = f"the learning rate rises again: a cosine of {risen['length']} moves has moved {risen['moves']} times"
        yield Failure(what, SCRIPT, FIX, content["risen_at"])
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
        yield Failure(what, SCRIPT, fix, content["made_at"])
