"""Finds mistakes of training scripts that no library reports, in the records of the ranks. Pure."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any

from accel_fsdp.config import Engine
from accel_fsdp.ranks import RankEvent
from accel_fsdp.rehearsal import copies, drawn_rows, repeated, schedules
from accel_fsdp.rehearsal.blame import Failure, mistake
from accel_fsdp.rehearsal.records import Content, Records
from accel_fsdp.units import counted, first_few

OF_GRADIENTS = "leave it out: FSDP has averaged the gradients over ranks; grad.full_tensor() of FSDP2 is a whole one"
WITHOUT_GRADIENT = 3
"""The last steps without a gradient that show a mistake; a single batch may have no labels."""


@dataclass(frozen=True)
class Judge:
    """`look` returns the values that the texts name in braces, with the `line`; None without a mistake."""

    look: Callable[[Records], Content | None]
    what: str
    fix: str

    def __call__(self, records: Records) -> Iterator[Failure]:
        if content := self.look(records):
            yield mistake(self.what.format(**content), content.get("fix", self.fix), content["line"])


def find(events: Sequence[RankEvent]) -> Iterator[Failure]:
    """Yields each mistake once, the most serious first."""
    records = Records(events)
    for judge in JUDGES:
        yield from judge(records)


def _mixed_shards(records: Records) -> Content | None:
    """A collective of the script takes different shards of a weight, or of its gradient, on two ranks of its group."""
    calls = sorted(records.of("shard-given"), key=lambda call: call.rank)
    for first, other in combinations(calls, 2):
        call, other_call = first.content, other.content
        is_same = first.rank == other.rank or any(call[key] != other_call[key] for key in ("line", "ranks"))
        name = call["name"] or other_call["name"]
        if name and not is_same and call["start"] != other_call["start"]:
            sizes = " and ".join("x".join(map(str, given["shape"])) for given in (call, other_call))
            content = {**call, "name": name, "first": first.rank, "other": other.rank, "sizes": sizes}
            return content | ({"fix": OF_GRADIENTS} if name.startswith("the gradient") else {})
    return None


def _optimizer_before_sharding(records: Records) -> Content | None:
    """The optimizer was made before the parameters were sharded: its steps change none of them, or only some."""
    step = next((steps[0] for _, steps in sorted(records.steps.items())), None)
    is_known = records.holdings and not records.engine_is(Engine.DEEPSPEED)  # which replaces the parameters
    return {**step, "line": step["made_at"]} if step and is_known and step["strange"] else None


def _nothing_prepared(records: Records) -> Content | None:
    """A saved state contains only what was prepared before."""
    if content := records.first("state-of-nothing"):
        verb = "saves" if content["call"] == "save_state" else "loads"
        return {**content, "verb": verb, "fix": f"accelerator.prepare(model, optimizer), then {content['call']}"}
    return None


def _never_stepped(records: Records) -> Content | None:
    """Gradients alone train nothing. A script without an optimizer may want only gradients."""
    by_engine = records.engine_is(Engine.DEEPSPEED)
    ends = list(records.ends.values())
    if not records.all_ended or (by_engine and any(end["steps"] for end in ends)):
        return None
    if not all(end["kept"] and end["optimizers"] and end["backwards"] for end in ends):
        return None
    passes = counted(ends[0]["backwards"], "backward pass", "backward passes")
    fix = "accelerator.backward(loss), in which DeepSpeed steps; or engine.backward(loss) and engine.step()"
    return {"passes": passes, "line": ends[0]["backward_line"], **({"fix": fix} if by_engine else {})}


def _may_differ(records: Records) -> bool:
    """Whether the ranks have copies of weights and end with equal ones, as with batches for only some ranks."""
    has_copies = any(step["is_copy"] for steps in records.steps.values() for step in steps)
    return has_copies and not copies.parted(records)


def _different_steps(records: Records) -> Content | None:
    """The ranks took different numbers of steps, so the shards of the model don't fit together."""
    counts = {rank: end["common_steps"] for rank, end in records.ends.items()} if records.all_ended else {}
    if len(set(counts.values())) < 2 or _may_differ(records):
        return None
    high, low = (choose(counts, key=lambda rank: counts[rank]) for choose in (max, min))
    line = next((step["line"] for step in records.steps.get(high, ())), "")
    steps = {"steps": counted(counts[high], "step"), "fewer": counts[low] or "none"}
    return {"high": high, "low": low, "line": line, **steps}


def _different_settings(records: Records) -> Content | None:
    """Each rank updates its shards of a weight, or its copy, so the ranks need the same rates at the same step."""
    (first, *others) = sorted(records.common_steps().items()) or [(0, [])]
    for number, step in enumerate(first[1]) if not _may_differ(records) else ():
        for rank, other in ((rank, steps[number]) for rank, steps in others if len(steps) > number):
            for name, *pair in _different_pairs(step["groups"], other["groups"]):
                line = (number and name == "lr" and other["moved_at"]) or other["made_at"]
                value, other_value = (", ".join(f"{number:g}" for number in numbers) for numbers in pair)
                values = {"name": name, "value": value, "other": other_value, "first": first[0], "rank": rank}
                fix = f"the same {name} on all ranks: neither it nor a schedule may depend on the rank or on its own "
                return {"step": number + 1, "line": line, "fix": f"{fix}values, such as its loss", **values}
    return None


def _different_pairs(groups: Sequence[Any], other_groups: Sequence[Any]) -> Iterator[tuple[str, Any, Any]]:
    """The settings that differ in two ranks' groups of parameters: each with both values."""
    for group, other_group in zip(groups, other_groups, strict=False):
        for name in group.keys() & other_group.keys():
            if not all(map(math.isclose, group[name], other_group[name])):
                yield name, group[name], other_group[name]


def _kept_gradients(records: Records) -> Content | None:
    """The optimizer adds the gradients of all earlier steps to each step's. DeepSpeed's engine clears by itself."""
    optimizers = {step["optimizer"] for steps in records.steps.values() for step in steps}
    for optimizer in sorted(optimizers) if not records.engine_is(Engine.DEEPSPEED) else ():
        pairs: list[tuple[int, Content, Content]] = []
        for steps in records.steps.values():
            numbered = enumerate(pairwise(step for step in steps if step["optimizer"] == optimizer), 2)
            pairs += [(number, *pair) for number, pair in numbered if pair[1]["backwards"] > pair[0]["backwards"]]
        if pairs and all(0 < step["oldest"] <= last["backwards"] for _, last, step in pairs):
            number, _, step = pairs[0]
            return {"step": number, "before": number - 1, "line": step["line"]}
    return None


def _not_finite(records: Records) -> Content | None:
    """The first loss that isn't finite, as later ones follow from it."""
    losses = (event for event in records.of("loss") if not math.isfinite(event.content["value"]))
    return next(({"rank": event.rank, **event.content} for event in losses), None)


def _without_gradients(records: Records) -> Content | None:
    """All gradients of a step are 0 on all ranks, to the end or in half of the steps: NaN may be hidden.

    A few may be meant, as of batches without labels. Where all are 0 and nothing in the script hides NaN, a plain run
    learns nothing either.
    """
    of_ranks = [[s["gradients"] for s in steps if "gradients" in s] for _, steps in sorted(records.steps.items())]
    is_zero = [not any(norms) for norms in zip(*of_ranks, strict=False)]
    if not records.all_ended or len(is_zero) < 2 or records.engine_is(Engine.DEEPSPEED):
        return None
    last = next((number for number, zero in enumerate(reversed(is_zero)) if not zero), len(is_zero))
    zeros = sum(is_zero)
    end = next(iter(records.ends.values()))
    line = end["lines"]["nan_to_num"]
    is_idle = zeros == len(is_zero) and line == end["backward_line"]
    if not is_idle and (last >= WITHOUT_GRADIENT or (zeros > 1 and 2 * zeros >= len(is_zero))):
        return {"zeros": zeros, "steps": counted(len(is_zero), "step"), "line": line}
    return None


def _in_no_optimizer(records: Records) -> Content | None:
    """Weights that get gradients and never change, while more weights do, unlike in a script that trains only a head.

    Or weights that are unfrozen later. Those that join an optimizer later, or that the script changes, don't count.
    """
    models = [model for end in records.ends.values() for model in end["models"]]
    left = {name for model in models for name in model["left"]} - {name for m in models for name in m["changed"]}
    thawed = sorted(left & {name for model in models for name in model["unfrozen"]})
    if not left or (not thawed and 2 * len(left) >= len({name for model in models for name in model["end"]})):
        return None
    end, names = next(iter(records.ends.values())), thawed or sorted(left)
    verb = "have gradients and never change" if len(names) > 1 else "has gradients and never changes"
    what = f"{first_few(names, 1)}, which {verb}"
    content = {"what": what, "line": next((s[0]["made_at"] for s in records.steps.values()), "")}
    if thawed:
        content["what"] += ", unfrozen later"
        content["fix"] = "optimizer.add_param_group with the prepared model's parameters, not those from before "
        content["fix"] += "prepare; or all weights to the optimizer, which skips frozen ones"
        if (added_at := end["lines"]["add_param_group"]) != end["backward_line"]:
            content["line"] = added_at
    return content


def _evaluates_on_one_rank(records: Records) -> Content | None:
    of_ranks = sorted(records.common_steps().items())
    for steps in zip(*(steps for _, steps in of_ranks), strict=False):
        modes = {rank: step["evaluating"] for (rank, _), step in zip(of_ranks, steps, strict=True)}
        if len(set(modes.values())) > 1:
            rank, other = (next(rank for rank, mode in modes.items() if mode is wanted) for wanted in (True, False))
            line = records.ends[rank]["lines"][".eval()"] if rank in records.ends else steps[0]["line"]
            return {"rank": rank, "other": other, "line": line}
    return None


JUDGES: tuple[Callable[[Records], Iterator[Failure]], ...] = (
    Judge(
        _mixed_shards,
        "{call} gets {name}, of which ranks {first} and {other} hold different parts ({sizes})",
        "set_seed on all ranks before the model is made, or this call before accelerator.prepare, while each rank has "
        "whole weights; param.full_tensor() of FSDP2 is a whole one",
    ),
    Judge(
        _optimizer_before_sharding,
        "the optimizer does not hold {missing} of the model's trained parameters, and holds {strange} that belong to "
        "no prepared model",
        "make the optimizer of the prepared model, or prepare both in one call: prepare(model, optimizer)",
    ),
    Judge(_nothing_prepared, "{call} comes before prepare, so that it {verb} no weights", ""),
    lambda records: drawn_rows.find(records.events),
    Judge(
        _never_stepped,
        "no weight was ever updated: {passes}, and no step of an optimizer",
        "optimizer.step() after backward; where gradients of several batches make a step, make sure it is reached",
    ),
    Judge(
        copies.unfrozen,
        "{names} frozen when DistributedDataParallel wrapped the model: unfrozen later, gradients are not averaged "
        "over ranks",
        "freeze after prepare, with find_unused_parameters=True in DistributedDataParallelKwargs; or wrap the model "
        "again after unfreezing",
    ),
    Judge(
        _different_steps,
        "the ranks' weights are of different steps: rank {high} took {steps} of an optimizer, rank {low} {fewer}",
        "optimizer.step() on every rank: outside of `if accelerator.is_main_process` and other conditions on the rank "
        "or on its own values, such as its loss",
    ),
    Judge(
        _different_settings,
        "the ranks' optimizers differ: at step {step} {name} is {value} on rank {first} and {other} on rank {rank}",
        "",
    ),
    Judge(
        _kept_gradients,
        "gradients are never cleared: step {step} still has those of step {before}",
        "optimizer.zero_grad() after each optimizer.step()",
    ),
    Judge(
        _not_finite,
        "the loss is {value} at step {step} of rank {rank}",
        "see what makes it so: labels that are all -100, a mean over no tokens, a log of 0, a rate too high",
    ),
    Judge(
        copies.at_other_batches,
        "the ranks step at different batches: step {step} comes after {batches}; {end}",
        "decide on all ranks alike whether to step: by a loss that is reduced over ranks",
    ),
    Judge(
        _evaluates_on_one_rank,
        "rank {rank} trains in evaluation mode, without dropout, and rank {other} in training mode",
        "model.train() on every rank after an evaluation",
    ),
    lambda records: repeated.differences(records.events),
    schedules.find,
    Judge(
        _without_gradients,
        "all gradients are 0 in {zeros} of {steps}: a loss that is NaN, and that a number replaces, gives none",
        "see what makes it so, such as labels that are all -100, and skip such batches; leave nan_to_num out",
    ),
    Judge(
        _in_no_optimizer,
        "no optimizer has {what}",
        "give them to the optimizer, as AdamW(model.parameters()) does; or requires_grad_(False) for them",
    ),
    Judge(
        copies.parting,
        "the ranks' copies of the model part: {end}",
        "change weights on all ranks in the same way; forward through the prepared model, backward without no_sync",
    ),
)
"""All judges, the most serious mistake first."""
