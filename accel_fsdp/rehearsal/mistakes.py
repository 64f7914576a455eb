"""Mistakes of training scripts that no library reports: what the ranks told, read for them. Pure."""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

from accel_fsdp.config import Engine
from accel_fsdp.launch.ranks import Event, Holding, holdings
from accel_fsdp.rehearsal.blame import SCRIPT, Failure
from accel_fsdp.units import counted

APART = 1e-3
"""How far the sums of a weight's values on two ranks may be apart, relative to its norm. Other random values: by 1."""


def found(events: Sequence[Event]) -> Iterator[Failure]:
    """Each mistake once, the gravest first."""
    held = holdings(events)
    for look in LOOKS:
        yield from look(events, held)


def _another_optimizer(events: Sequence[Event], held: dict[int, Holding]) -> Iterator[Failure]:
    """Made from the parameters before they were sharded: its steps change nothing, or not all."""
    for event in _of("optimizer", events)[:1]:
        holding = held.get(event.rank)
        if holding is None or holding.engine.startswith(Engine.DEEPSPEED.label):  # which makes its own of each
            continue
        missing, strange = event.content["missing"], event.content["strange"]
        if strange:  # what it lacks may be another optimizer's
            what = f"the optimizer lacks {missing} of the model's trained parameters and has {strange} of no model's"
            yield Failure(
                what,
                SCRIPT,
                "make the optimizer of the prepared model, or prepare both in one call: prepare(model, optimizer)",
                event.content["line"],
            )


def _same_rows(events: Sequence[Event], held: dict[int, Holding]) -> Iterator[Failure]:
    """A dataloader that was not prepared gives each rank the same rows."""
    told = _of("rows", events)
    rows = [event.content["hashes"] for event in told]
    prepared = _of("prepared-rows", events)  # then rows that are alike are so in the data
    if not prepared and len(rows) > 1 and rows[0] and all(one == rows[0] for one in rows):
        yield Failure(
            f"all {len(rows)} ranks train on the same rows",
            SCRIPT,
            "accelerator.prepare(dataloader), or a DistributedSampler",
            told[0].content["line"],
        )


def _other_units(events: Sequence[Event], held: dict[int, Holding]) -> Iterator[Failure]:
    """FSDP gathers a unit from all ranks: those that run another one meanwhile mix its weights with theirs, or hang."""
    orders = {event.rank: event.content["names"] for event in _of("units", events)}
    first, *others = sorted(orders) or [0]
    for rank in others:
        for ours, theirs in zip_longest(orders[first], orders[rank], fillvalue="nothing"):
            if ours != theirs:
                yield Failure(
                    f"the ranks run different units: rank {first} runs {ours or 'the model'} "
                    f"where rank {rank} runs {theirs or 'the model'}",
                    "fsdp_transformer_layer_cls_to_wrap",
                    "make a unit of the layer that holds the experts, which every rank runs, not of each expert",
                )
                return


def _untied(events: Sequence[Event], held: dict[int, Holding]) -> Iterator[Failure]:
    """FSDP1 gathers a weight with the unit that has it first; a module of another unit then sees a shard of it."""
    for event in _of("prepared", events)[:1]:
        holding = held[event.rank]
        if not holding.engine.startswith(Engine.FSDP1.label):
            continue
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
    """The path of the innermost unit that has this weight."""
    found = (unit.name for unit in holding.units if not unit.name or name.startswith(f"{unit.name}."))
    return max(found, key=len, default="")


def _clipped_by_torch(events: Sequence[Event], held: dict[int, Holding]) -> Iterator[Failure]:
    """Each rank takes the norm of its own shards: they are scaled differently."""
    for event in _of("clipped", events)[:1]:
        holding = held.get(event.rank)
        if holding and holding.engine.startswith(Engine.FSDP1.label) and holding.held < holding.weights:
            yield Failure(
                "gradients are clipped by torch.nn.utils.clip_grad_norm_, which sees this rank's shards alone",
                SCRIPT,
                "accelerator.clip_grad_norm_(model.parameters(), norm), or model.clip_grad_norm_(norm)",
                event.content["line"],
            )


def _forgotten_rng(events: Sequence[Event], held: dict[int, Holding]) -> Iterator[Failure]:
    """Dropout draws another mask when a layer runs again: the gradients are of another pass."""
    for event in _of("forgot-rng", events)[:1]:
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


def _begun_apart(events: Sequence[Event], held: dict[int, Holding]) -> Iterator[Failure]:
    """Each rank keeps its part of its own model: together they are none. A weight that was loaded later has no value.

    DDP, FSDP1's `sync_module_states` and Accelerate's loading on rank 0 send that of rank 0 to all before.
    """
    told = {event.rank: event.content["units"] for event in _of("begun", events)}
    lines = {event.rank: str(event.content["line"]) for event in _of("begun", events)}
    for rank, units in sorted(told.items()):
        for number, unit in enumerate(units):
            first = min(unit["ranks"])
            theirs = told.get(first, [])[number : number + 1]
            if not theirs or theirs[0]["ranks"] != unit["ranks"]:
                continue
            if name := _other_value(theirs[0]["weights"], unit["weights"]):
                yield Failure(
                    f"the ranks shard different models: {name} has other values on rank {rank} than on rank {first}",
                    SCRIPT,
                    "the same seed on all ranks before the model is made: accelerate.utils.set_seed(0); or let rank 0 "
                    "send its weights, in FSDP1 by fsdp_sync_module_states, in FSDP2 by fsdp_cpu_ram_efficient_loading",
                    lines.get(rank, ""),
                )
                return


def _other_value(ours: Sequence[Sequence[Any]], theirs: Sequence[Sequence[Any]]) -> str:
    """The name of the first weight with two values that are apart by more than rounding."""
    for (name, one), (other_name, other) in zip(ours, theirs, strict=False):
        if name == other_name and None not in (one, other) and abs(one[0] - other[0]) > APART * max(one[1], other[1]):
            return str(name)
    return ""


def _no_step(events: Sequence[Event], held: dict[int, Holding]) -> Iterator[Failure]:
    """Gradients alone train nothing. A script that makes no optimizer may want no more than them."""
    told = [event.content for event in _of("trained", events)]
    if any(one.engine.startswith(Engine.DEEPSPEED.label) for one in held.values()):  # which steps by itself
        return
    if told and _all_ended(events) and all(one["kept"] and one["optimizers"] and one["backwards"] for one in told):
        backwards = counted(told[0]["backwards"], "backward pass", "backward passes")
        yield Failure(
            f"no weight was ever updated: {backwards}, and no step of an optimizer",
            SCRIPT,
            "optimizer.step() after backward; where gradients of several batches make a step, let it come to one",
            told[0]["backward_line"],
        )


def _steps_apart(events: Sequence[Event], held: dict[int, Holding]) -> Iterator[Failure]:
    """The parts of a model on the ranks are then of different steps."""
    counts = _final_steps(events, held) if _all_ended(events) else _steps_until_now(events)
    if len(set(counts.values())) < 2:
        return
    most, least = (choose(counts, key=lambda rank: counts[rank]) for choose in (max, min))
    yield Failure(
        f"the ranks' weights are of different steps: rank {most} took {counted(counts[most], 'step')} of an "
        f"optimizer, rank {least} {counts[least] or 'none'}",
        SCRIPT,
        "optimizer.step() on every rank: outside of `if accelerator.is_main_process` and of what a rank sees alone",
        next((event.content["line"] for event in _of("first-step", events) if event.rank == most), ""),
    )


def _final_steps(events: Sequence[Event], held: dict[int, Holding]) -> dict[int, int]:
    """Of each rank, with weights that FSDP shards; under DDP with any, where a rank has none and as many gradients."""
    told = {event.rank: event.content for event in _of("trained", events)}
    sharded = {rank: one["sharded_steps"] for rank, one in told.items()}
    ddp = held and all(one.engine == Engine.DDP.label for one in held.values())
    if not ddp or any(sharded.values()) or len({one["backwards"] for one in told.values()}) > 1:
        return sharded
    counts = {rank: one["steps"] for rank, one in told.items()}
    return {} if all(counts.values()) else counts


def _steps_until_now(events: Sequence[Event]) -> dict[int, int]:
    """Of each rank, before its last backward pass: where they have run as many, and one of them never stepped.

    Such a script fails or hangs where it saves the optimizer, and says something else.
    """
    steps: dict[int, list[int]] = {}
    for event in _of("loss", events):
        steps.setdefault(event.rank, []).append(event.content["step"] - 1)
    counts = {rank: several[-1] for rank, several in steps.items()}
    as_many = len({len(several) for several in steps.values()}) == 1
    everywhere = set(steps) == {event.rank for event in _of("began", events)}
    return counts if as_many and everywhere and not all(counts.values()) else {}


def _saved_shards(events: Sequence[Event], held: dict[int, Holding]) -> Iterator[Failure]:
    """A file for each rank's part is a way to go on with as many ranks; one file of one part is no model."""
    saves = _of("saved-shards", events) if _all_ended(events) else []  # others may have been about to write theirs
    writers: dict[str, set[int]] = {}
    for event in saves:
        writers.setdefault(event.content["file"], set()).add(event.rank)
    alone = {rank for several in writers.values() if len(several) == 1 for rank in several}
    shard_ranks = max((unit.ranks for one in held.values() for unit in one.units), default=2)
    if saves and len(alone) < shard_ranks:
        first = saves[0].content
        yield Failure(
            f"torch.save wrote {first['shards']} of {counted(first['tensors'], 'tensor')} as the part that rank "
            f"{saves[0].rank} holds",
            SCRIPT,
            "state = accelerator.get_state_dict(model) on all ranks, then torch.save(state, file) on rank 0; without "
            "Accelerate torch.distributed.checkpoint.state_dict.get_model_state_dict with full_state_dict=True",
            first["line"],
        )


def _not_finite(events: Sequence[Event], held: dict[int, Holding]) -> Iterator[Failure]:
    """The first such loss: those after it follow from it."""
    for event in _of("loss", events):
        if not math.isfinite(event.content["value"]):
            yield Failure(
                f"the loss is {event.content['value']} at step {event.content['step']} of rank {event.rank}",
                SCRIPT,
                "see what makes it so: labels that are all -100, a mean of nothing, a log of 0, too high a rate",
                event.content["line"],
            )
            return


def _no_tracker(events: Sequence[Event], held: dict[int, Holding]) -> Iterator[Failure]:
    """Accelerate leaves out what isn't installed, and the run is recorded nowhere."""
    for event in _of("no-tracker", events)[:1]:
        names = event.content["names"]
        yield Failure(
            f"log_with names {', '.join(names)}, which isn't installed: nothing is recorded there",
            SCRIPT,
            f"pip install {' '.join(names)}; or leave it out of log_with",
            event.content["line"],
        )


def _all_ended(events: Sequence[Event]) -> bool:
    """Whether the script came to its end on each rank."""
    return bool(events) and {one.rank for one in _of("trained", events)} == {one.rank for one in _of("began", events)}


def _of(kind: str, events: Sequence[Event]) -> list[Event]:
    return [event for event in events if event.kind == kind]


LOOKS: tuple[Callable[[Sequence[Event], dict[int, Holding]], Iterator[Failure]], ...] = (
    _another_optimizer,
    _begun_apart,
    _other_units,
    _same_rows,
    _untied,
    _clipped_by_torch,
    _forgotten_rng,
    _no_tracker,
    _no_step,
    _steps_apart,
    _saved_shards,
    _not_finite,
)
