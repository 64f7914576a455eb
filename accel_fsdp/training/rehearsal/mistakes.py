"""Mistakes of training scripts that no library reports: what the ranks told, read for them. Pure."""

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest

from accel_fsdp.config import Engine
from accel_fsdp.launch.ranks import Event, Holding, holdings
from accel_fsdp.training.rehearsal.blame import SCRIPT, Failure


def found(events: Sequence[Event]) -> Iterator[Failure]:
    """Each mistake once, the gravest first."""
    held = holdings(events)
    for look in LOOKS:
        yield from look(events, held)


def _another_optimizer(events: Sequence[Event], held: dict[int, Holding]) -> Iterator[Failure]:
    """Made from the parameters before they were sharded: its steps change nothing, or not all."""
    for event in _of("optimizer", events)[:1]:
        holding = held.get(event.rank)
        if holding is None or holding.engine.startswith(Engine.DEEPSPEED.value):  # which makes its own of each
            continue
        missing, strange = event.content["missing"], event.content["strange"]
        if strange:  # what it lacks may be another optimizer's
            what = f"the optimizer lacks {missing} of the model's trained parameters and has {strange} of no model's"
            yield Failure(
                what,
                SCRIPT,
                "make the optimizer of the prepared model, or prepare both in one call: prepare(model, optimizer)",
            )


def _same_rows(events: Sequence[Event], held: dict[int, Holding]) -> Iterator[Failure]:
    """A dataloader that was not prepared gives each rank the same rows."""
    rows = [event.content["hashes"] for event in _of("rows", events)]
    if len(rows) > 1 and rows[0] and all(one == rows[0] for one in rows):
        yield Failure(
            f"all {len(rows)} ranks train on the same rows",
            SCRIPT,
            "accelerator.prepare(dataloader), or a DistributedSampler",
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
        if not holding.engine.startswith(Engine.FSDP1.value):
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
        if holding and holding.engine.startswith(Engine.FSDP1.value) and holding.held < holding.weights:
            yield Failure(
                "gradients are clipped by torch.nn.utils.clip_grad_norm_, which sees this rank's shards alone",
                SCRIPT,
                "accelerator.clip_grad_norm_(model.parameters(), norm), or model.clip_grad_norm_(norm)",
                event.content["line"],
            )


def _forgotten_rng(events: Sequence[Event], held: dict[int, Holding]) -> Iterator[Failure]:
    """Dropout draws another mask when a layer runs again: the gradients are of another pass."""
    for event in _of("forgot-rng", events)[:1]:
        yield Failure(
            "activation checkpointing runs layers again with other random numbers: dropout differs in backward",
            "preserve_rng_state",
            "leave preserve_rng_state true",
            event.content["line"],
        )


def _of(kind: str, events: Sequence[Event]) -> list[Event]:
    return [event for event in events if event.kind == kind]


LOOKS: tuple[Callable[[Sequence[Event], dict[int, Holding]], Iterator[Failure]], ...] = (
    _another_optimizer,
    _other_units,
    _same_rows,
    _untied,
    _clipped_by_torch,
    _forgotten_rng,
)
