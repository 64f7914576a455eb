"""Judges learning rates over a run: idle steps, and schedules that are too short or too long. Pure."""

import math
from collections.abc import Iterator

from accel_fsdp.rehearsal.blame import Failure, mistake
from accel_fsdp.rehearsal.records import Content, Records
from accel_fsdp.units import counted

IDLE = 0.25
"""The share of the steps that may have a rate of 0 at the end, after others had one."""
OVER = 1.25
"""How many times as often as planned a schedule may move, or more if Accelerate filled up an epoch for all ranks."""
FIX = (
    "scheduler.step() once per step of the optimizer, for as many as there are; a scheduler that Accelerate prepared "
    "moves num_processes times in each, so give it num_processes times as many"
)


def find(records: Records) -> Iterator[Failure]:
    """Yields the mistakes of the first rank's schedules."""
    rank = min(records.ends, default=0)
    steps = records.steps.get(rank, [])
    if rank not in records.ends or not steps:
        return
    schedules = records.ends[rank]["schedules"]
    counts = [sum(step["optimizer"] in schedule["optimizers"] for step in steps) for schedule in schedules]
    for schedule in (schedule for schedule, count in zip(schedules, counts, strict=True) if not count):
        if schedule["moves"] > 1:
            what = "a scheduler changes the rate of an optimizer that never steps, while another one steps"
            yield mistake(what, "make the scheduler of the optimizer that steps, after it", schedule["made_at"])
    first = schedules[counts.index(max(counts))] if schedules else None
    moves, line = (first["moves"], _line(first, len(steps))) if first else (0, "")
    idle = next((number for number, step in enumerate(reversed(steps)) if any(_rates(step))), 0)
    filled = _filled(records, rank)
    if idle > 1 and idle >= IDLE * len(steps) and idle > math.ceil((1 - 1 / filled) * len(steps)):
        what = f"the learning rate is 0 in the last {idle} of {counted(len(steps), 'step')}"
        yield mistake(what + (f": the scheduler moved {moves} times" if moves > len(steps) else ""), FIX, line)
    for schedule, own in zip(schedules, counts, strict=True):
        planned, moves = schedule["planned"], schedule["moves"]
        is_due = own <= planned + 1 or not schedule["may_rise"]  # torch's cosine rises again by its formula
        if planned and is_due and moves > max(OVER, filled) * planned:
            what = f"the learning rate's schedule for {counted(planned, 'move')} has moved {moves} times"
            yield mistake(f"{what} in {counted(own, 'step')}", FIX, _line(schedule, own))
            return
    if first and first["is_by_script"]:
        yield from _unfinished(records, first, rank)


def _line(schedule: Content, steps: int) -> str:
    """The script's line that moves a schedule more often than there are steps, or the one that made it."""
    is_often = schedule["is_by_script"] and schedule["moves"] > steps
    return str(schedule["moved_at"] if is_often else schedule["made_at"])


def _filled(records: Records, rank: int) -> float:
    """How many times as many batches the ranks take in an epoch as it has: 4/3 if two ranks share three.

    Batches that a rank doesn't share are its own, so that none was filled up; an epoch of one batch may be either.
    """
    of_all, of_rank = records.ends[rank]["batches"]
    return of_rank * len(records.ends) / of_all if of_rank < of_all or of_all == 1 else 1.0


def _rates(step: Content) -> list[float]:
    return [rate for group in step["groups"] for rate in group.get("lr", [1.0])]


def _unfinished(records: Records, schedule: Content, rank: int) -> Iterator[Failure]:
    """A schedule for the batches of all ranks, in a run that ends with an epoch and moved it for those of one rank."""
    (of_all, of_rank), planned, moves = records.ends[rank]["batches"], schedule["planned"], schedule["moves"]
    micro_batches = max(1, round(records.ends[rank]["backwards"] / len(records.steps[rank])))
    epochs, rest = divmod(moves, math.ceil(of_rank / micro_batches) or 1)
    per_epoch = {of_all, of_all // micro_batches, math.ceil(of_all / micro_batches)}
    lengths = {epochs * batches for batches in per_epoch} | {epochs * of_all // micro_batches}
    if of_rank < of_all and moves and not rest and planned in lengths and planned > moves:
        what = (
            f"the learning rate's schedule ends after {moves} of {planned} moves: it was made for epochs of "
            f"{counted(of_all, 'batch', 'batches')}, and each rank has {of_rank} of them"
        )
        fix = "accelerator.prepare(scheduler), which moves it num_processes times in each step; or len(loader) after it"
        yield mistake(what, fix, schedule["made_at"])
