"""Finds mistakes of training scripts that no library reports, in the events of the ranks. Pure."""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

from accel_fsdp.config import Engine
from accel_fsdp.ranks import Holding, RankEvent, holdings
from accel_fsdp.rehearsal import absent, drawn_rows, effects, mixed_shards, repeated, replicas
from accel_fsdp.rehearsal.blame import SCRIPT, Failure, mistake
from accel_fsdp.rehearsal.job import CONSEQUENCE
from accel_fsdp.units import counted

APART = 1e-3
"""The largest difference of a weight's sums on two ranks, relative to its norm; other random values differ by 1."""


def find(events: Sequence[RankEvent]) -> Iterator[Failure]:
    """Yields each mistake once, the most serious first."""
    by_rank = holdings(events)
    yield from mixed_shards.find(events)
    for look in LOOKS:
        yield from look(events, by_rank)
    yield from replicas.at_other_batches(events)
    yield from repeated.differences(events)
    yield from effects.mistakes(events)
    yield from replicas.mistakes(events)


def _swallowed_error(events: Sequence[RankEvent], by_rank: dict[int, Holding]) -> Iterator[Failure]:
    """A rank that catches an error of its model, such as out of memory, leaves the others in a collective."""
    caused = {(event.rank, error) for event in _events("failed", events) for error in event.content.get("follows", ())}
    began = {event.rank for event in _events("began", events)}
    ranks: dict[tuple[str, str], set[int]] = {}
    for event in _events("raised", events):
        error, line = event.content["error"], event.content["line"]
        if (event.rank, error) not in caused and not CONSEQUENCE.search(error):
            ranks.setdefault((line, error.partition(":")[0]), set()).add(event.rank)
    for event in _events("raised", events):
        raised_on = ranks.get((event.content["line"], event.content["error"].partition(":")[0]), began)
        if event.rank in raised_on and raised_on != began:
            yield mistake(
                f"rank {event.rank} alone went on after an error of its model: {event.content['error']}",
                absent.FIXES["caught"],
                event.content["line"],
            )
            return


def _optimizer_before_sharding(events: Sequence[RankEvent], by_rank: dict[int, Holding]) -> Iterator[Failure]:
    """The optimizer was made before the parameters were sharded: its steps change none of them, or only some."""
    if event := _first_event("optimizer", events):
        holding = by_rank.get(event.rank)
        if holding is None or holding.engine.startswith(Engine.DEEPSPEED.label):  # DeepSpeed replaces the parameters
            return
        missing, foreign = event.content["missing"], event.content["strange"]
        if foreign:  # the missing ones alone may be another optimizer's
            what = (
                f"the optimizer does not hold {missing} of the model's trained parameters, and holds {foreign} that "
                "belong to no prepared model"
            )
            yield mistake(
                what,
                "make the optimizer of the prepared model, or prepare both in one call: prepare(model, optimizer)",
                event.content["line"],
            )


def _different_units(events: Sequence[RankEvent], by_rank: dict[int, Holding]) -> Iterator[Failure]:
    """FSDP gathers a unit from all ranks: ranks that run another unit meanwhile mix up the weights, or hang."""
    orders = {
        event.rank: list(zip(event.content["names"], event.content["lines"], strict=True))
        for event in _events("units", events)
    }
    first, *others = sorted(orders) or [0]
    by_yaml = any(_events("prepared", events))
    for rank in others:
        for unit, other_unit in zip_longest(orders[first], orders[rank], fillvalue=("nothing", "")):
            if unit[0] != other_unit[0]:
                yield Failure(
                    f"the ranks run different units: rank {first} runs {unit[0] or 'the model'} "
                    f"where rank {rank} runs {other_unit[0] or 'the model'}",
                    "fsdp_transformer_layer_cls_to_wrap" if by_yaml else SCRIPT,
                    "make a unit of a module that every rank runs, such as the layer of experts, not of each expert",
                    unit[1] or other_unit[1],
                )
                return


def _separated_ties(events: Sequence[RankEvent], by_rank: dict[int, Holding]) -> Iterator[Failure]:
    """FSDP1 gathers a shared weight with the first unit that has it; a module of another unit then sees a shard."""
    if event := _first_event("prepared", events):
        holding = by_rank[event.rank]
        if not holding.engine.startswith(Engine.FSDP1.label):
            return
        for names in event.content["shared"]:
            units = {name: _unit_of(name, holding) for name in names}
            if len(set(units.values())) > 1:
                places = " and ".join(f"{name} in the unit {unit or 'of the model'}" for name, unit in units.items())
                yield Failure(
                    f"one weight is in several units: {places}",
                    "fsdp_transformer_layer_cls_to_wrap",
                    "leave the modules that share a weight, such as embedding and head, in one unit",
                )


def _unit_of(name: str, holding: Holding) -> str:
    paths = (unit.name for unit in holding.units if not unit.name or name.startswith(f"{unit.name}."))
    return max(paths, key=len, default="")


def _clipped_by_torch(events: Sequence[RankEvent], by_rank: dict[int, Holding]) -> Iterator[Failure]:
    """Each rank takes the norm of its own shards, so the ranks scale their gradients differently."""
    if event := _first_event("clipped", events):
        holding = by_rank.get(event.rank)
        if holding and holding.engine.startswith(Engine.FSDP1.label) and holding.held < holding.weights:
            yield mistake(
                "gradients are clipped by torch.nn.utils.clip_grad_norm_, which only sees this rank's shards",
                "accelerator.clip_grad_norm_(model.parameters(), norm), or model.clip_grad_norm_(norm)",
                event.content["line"],
            )


def _forgotten_rng(events: Sequence[RankEvent], by_rank: dict[int, Holding]) -> Iterator[Failure]:
    """Dropout draws another mask when a layer runs again, so the gradients belong to another forward pass."""
    if event := _first_event("forgot-rng", events):
        of_yaml = event.content["by_wrapper"]
        yield Failure(
            "activation checkpointing runs layers again with other random numbers: dropout differs in backward",
            "fsdp_activation_checkpointing" if of_yaml else "preserve_rng_state",
            "fsdp_activation_checkpointing: false, and model.gradient_checkpointing_enable(), which keeps them; "
            "or no dropout"
            if of_yaml
            else "leave preserve_rng_state true",
            event.content["line"],
        )


def _lost_moments(events: Sequence[RankEvent], by_rank: dict[int, Holding]) -> Iterator[Failure]:
    """A resumed optimizer without its moments: the first steps after the resume are larger than they should be."""
    if event := _first_event("anew", events):
        yield Failure(
            f"{event.content['optimizer']} lost its states: {event.content['checkpoint']} was loaded, and the next "
            "step finds none of its states",
            "fsdp_state_dict_type",
            "fsdp_version: 2, or fsdp_state_dict_type: FULL_STATE_DICT; Accelerate loads no sharded one under FSDP1",
            event.content["line"],
        )


def _different_models(events: Sequence[RankEvent], by_rank: dict[int, Holding]) -> Iterator[Failure]:
    """Each rank shards its own random model, so the shards don't fit together. A weight loaded later has no value here.

    DDP, FSDP1's `sync_module_states` and Accelerate's loading on rank 0 send rank 0's weights to all before.
    """
    units_of = {event.rank: event.content["units"] for event in _events("begun", events)}
    lines = {event.rank: str(event.content["line"]) for event in _events("begun", events)}
    for rank, units in sorted(units_of.items()):
        for number, unit in enumerate(units):
            first = min(unit["ranks"])
            first_units = units_of.get(first, [])[number : number + 1]
            if not first_units or first_units[0]["ranks"] != unit["ranks"]:
                continue
            if name := _first_different_weight(first_units[0]["weights"], unit["weights"]):
                yield mistake(
                    f"the ranks shard different models: {name} differs between ranks {first} and {rank}",
                    "the same seed on all ranks before the model is made: accelerate.utils.set_seed(0); or let rank 0 "
                    "send its weights, in FSDP1 by fsdp_sync_module_states, in FSDP2 by fsdp_cpu_ram_efficient_loading",
                    lines.get(rank, ""),
                )
                return


def _first_different_weight(first_sums: Sequence[Sequence[Any]], other_sums: Sequence[Sequence[Any]]) -> str:
    """The name of the first weight whose values differ by more than rounding."""
    for (name, our_sums), (other_name, their_sums) in zip(first_sums, other_sums, strict=False):
        if name != other_name or None in (our_sums, their_sums):
            continue
        (our_sum, our_norm), (their_sum, their_norm) = our_sums, their_sums
        if abs(our_sum - their_sum) > APART * max(our_norm, their_norm):
            return str(name)
    return ""


def _never_stepped(events: Sequence[RankEvent], by_rank: dict[int, Holding]) -> Iterator[Failure]:
    """Gradients alone train nothing. A script without an optimizer may want only gradients."""
    reports = [event.content for event in _events("trained", events)]
    by_engine = _by_deepspeed(by_rank)
    if by_engine and any(report["steps"] for report in reports):
        return
    nothing_moved = all(report["kept"] and report["optimizers"] and report["backwards"] for report in reports)
    if reports and _all_ended(events) and nothing_moved:
        backwards = counted(reports[0]["backwards"], "backward pass", "backward passes")
        fix = "optimizer.step() after backward; where gradients of several batches make a step, make sure it is reached"
        if by_engine:
            fix = "accelerator.backward(loss), in which DeepSpeed steps; or engine.backward(loss) and engine.step()"
        what = f"no weight was ever updated: {backwards}, and no step of an optimizer"
        yield mistake(what, fix, reports[0]["backward_line"])


def _different_steps(events: Sequence[RankEvent], by_rank: dict[int, Holding]) -> Iterator[Failure]:
    """The ranks took different numbers of steps, so the shards of the model don't fit together."""
    reports = {event.rank: event.content["common_steps"] for event in _events("trained", events)}
    counts = reports if _all_ended(events) else _steps_until_now(events)
    if len(set(counts.values())) < 2 or (_all_ended(events) and _may_differ(events)):
        return
    highest, lowest = (choose(counts, key=lambda rank: counts[rank]) for choose in (max, min))
    yield mistake(
        f"the ranks' weights are of different steps: rank {highest} took {counted(counts[highest], 'step')} of an "
        f"optimizer, rank {lowest} {counts[lowest] or 'none'}",
        "optimizer.step() on every rank: outside of `if accelerator.is_main_process` and other conditions on the rank "
        "or on its own values, such as its loss",
        next((event.content["line"] for event in _events("first-step", events) if event.rank == highest), ""),
    )


def _may_differ(events: Sequence[RankEvent]) -> bool:
    """Whether the ranks have copies of weights and end with equal ones, as with batches for only some ranks."""
    return any("backwards" in event.content for event in _events("settings", events)) and not replicas.parted(events)


def _different_settings(events: Sequence[RankEvent], by_rank: dict[int, Holding]) -> Iterator[Failure]:
    """Each rank updates its shards of a weight, or its copy, so the ranks need the same rates at the same step."""
    if _may_differ(events):
        return
    by_step: dict[int, dict[int, RankEvent]] = {}
    for event in _events("settings", events):
        by_step.setdefault(event.content["step"], {})[event.rank] = event
    for step, reports in sorted(by_step.items()):
        first, *others = sorted(reports)
        for rank in others:
            if different := _first_different_setting(reports[first].content["groups"], reports[rank].content["groups"]):
                name, value, other_value = different
                moved_at = reports[rank].content["moved_at"] if name == "lr" and step > min(by_step) else ""
                yield mistake(
                    f"the ranks' optimizers differ: at step {step} {name} is {value} on rank {first} and "
                    f"{other_value} on rank {rank}",
                    f"the same {name} on all ranks: neither it nor a schedule may depend on the rank "
                    "or on its own values, such as its loss",
                    moved_at or reports[rank].content["line"],
                )
                return


def _first_different_setting(first_groups: Sequence[Any], other_groups: Sequence[Any]) -> tuple[str, str, str] | None:
    """The first setting that differs in two ranks' groups of parameters: its name and both values."""
    for group, other_group in zip(first_groups, other_groups, strict=False):
        for name in group.keys() & other_group.keys():
            pairs = list(zip(group[name], other_group[name], strict=False))
            if not all(math.isclose(left, right) for left, right in pairs):
                texts = [", ".join(f"{number:g}" for number in numbers) for numbers in (group[name], other_group[name])]
                return name, texts[0], texts[1]
    return None


def _kept_gradients(events: Sequence[RankEvent], by_rank: dict[int, Holding]) -> Iterator[Failure]:
    """The optimizer adds the gradients of all earlier steps to each step's."""
    reports = _events("gradients", events)
    if _by_deepspeed(by_rank):  # DeepSpeed's engine clears by itself
        return
    if reports and all(event.content["kept"] for event in reports):
        first = reports[0].content
        yield mistake(
            f"gradients are never cleared: step {first['step']} still has those of step {first['step'] - 1}",
            "optimizer.zero_grad() after each optimizer.step()",
            first["line"],
        )


def _steps_until_now(events: Sequence[RankEvent]) -> dict[int, int]:
    """Each rank's steps before its last backward pass, if all ran as many passes and one never stepped.

    Such a script fails or hangs when it saves the optimizer, with an unrelated message.
    """
    steps: dict[int, list[int]] = {}
    for event in _events("loss", events):
        steps.setdefault(event.rank, []).append(event.content["step"] - 1)
    counts = {rank: counts_of[-1] for rank, counts_of in steps.items()}
    is_equal_count = len({len(counts_of) for counts_of in steps.values()}) == 1
    on_all_ranks = set(steps) == {event.rank for event in _events("began", events)}
    return counts if is_equal_count and on_all_ranks and not all(counts.values()) else {}


def _not_finite(events: Sequence[RankEvent], by_rank: dict[int, Holding]) -> Iterator[Failure]:
    """Reports the first loss that isn't finite, as later ones follow from it; or NaN weights behind finite losses."""
    for event in _events("loss", events):
        if not math.isfinite(event.content["value"]):
            yield mistake(
                f"the loss is {event.content['value']} at step {event.content['step']} of rank {event.rank}",
                "see what makes it so: labels that are all -100, a mean over no tokens, a log of 0, a rate too high",
                event.content["line"],
            )
            return
    for event in _events("trained", events):
        if count := event.content["not_numbers"]:
            what = f"{counted(count, 'weight')} of rank {event.rank} hold NaN after training, and no loss was NaN"
            fix = "see what makes it so, and leave out what hides it: nan_to_num, or torch.where of a loss that is NaN"
            yield mistake(what, fix, event.content["hidden_at"])
            return


def _nothing_prepared(events: Sequence[RankEvent], by_rank: dict[int, Holding]) -> Iterator[Failure]:
    """A saved state contains only what was prepared before."""
    if event := _first_event("state-of-nothing", events):
        call, line = event.content["call"], event.content["line"]
        verb = "saves" if call == "save_state" else "loads"
        what = f"{call} comes before prepare, so that it {verb} no weights"
        yield mistake(what, f"accelerator.prepare(model, optimizer), then {call}", line)


def _no_tracker(events: Sequence[RankEvent], by_rank: dict[int, Holding]) -> Iterator[Failure]:
    """Accelerate leaves out trackers that aren't installed, and the run isn't recorded."""
    if event := _first_event("no-tracker", events):
        names = event.content["names"]
        yield mistake(
            f"log_with names {', '.join(names)}, which isn't installed: nothing is recorded there",
            f"pip install {' '.join(names)}; or leave it out of log_with",
            event.content["line"],
        )


def _by_deepspeed(by_rank: dict[int, Holding]) -> bool:
    return any(report.engine.startswith(Engine.DEEPSPEED.label) for report in by_rank.values())


def _all_ended(events: Sequence[RankEvent]) -> bool:
    began, trained = ({event.rank for event in _events(kind, events)} for kind in ("began", "trained"))
    return bool(events) and began == trained


def _events(kind: str, events: Sequence[RankEvent]) -> list[RankEvent]:
    return [event for event in events if event.kind == kind]


def _first_event(kind: str, events: Sequence[RankEvent]) -> RankEvent | None:
    return next(iter(_events(kind, events)), None)


LOOKS: tuple[Callable[[Sequence[RankEvent], dict[int, Holding]], Iterator[Failure]], ...] = (
    _swallowed_error,
    _optimizer_before_sharding,
    _different_models,
    _lost_moments,
    _different_units,
    lambda events, _: drawn_rows.find(events),
    _separated_ties,
    _clipped_by_torch,
    _forgotten_rng,
    _no_tracker,
    _nothing_prepared,
    _never_stepped,
    lambda events, _: replicas.unfrozen(events),
    _different_steps,
    _different_settings,
    _kept_gradients,
    _not_finite,
)
