"""One predicted step, unit by unit: memory of each stretch, its time on a known GPU, and each unit's traffic. Pure.

A stretch lies between two moments that a running job can observe too: a unit's forward from the gathering of its
parameters to that of the next unit, its backward from the gradient of its output to that of its input.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from accel_fsdp.hardware import Gpu
from accel_fsdp.job import Layout, Recipe
from accel_fsdp.prediction import communication, speed
from accel_fsdp.prediction.communication import Traffic
from accel_fsdp.prediction.memory import ModelShape, Tapes, Unit, step

Phase = Literal["forward", "backward", "update"]
EMBEDDING, HEAD, UPDATE = "embedding", "head and loss", "optimizer"
OUTSIDE = "embedding and head"
"""The unit of all parameters outside the blocks, if one unit has both ends of the model."""


@dataclass(frozen=True)
class Stretch:
    """A unit in one phase of one micro-batch: peak bytes, bytes after it, and its duration.

    `layer` is the index of a block among those that process text, None for embedding and head. Seconds are None if the
    GPU is unknown.
    """

    micro_batch: int
    phase: Phase
    unit: str
    layer: int | None
    peak_bytes: int
    after_bytes: int
    seconds: float | None


@dataclass(frozen=True)
class UnitTraffic:
    """The bytes that one rank sends in a step for all units of a name."""

    unit: str
    count: int
    gathers: Traffic
    reduces: Traffic


@dataclass(frozen=True)
class UnitSteps:
    """One step of one rank.

    `between_bytes` are allocated between steps. Of many micro-batches it has the first, second and last.
    """

    between_bytes: int
    stretches: tuple[Stretch, ...]
    sent: tuple[UnitTraffic, ...]


def unit_steps(
    shape: ModelShape, tapes: Tapes, recipe: Recipe, layout: Layout, gpu: Gpu | None, workspace_bytes: int
) -> UnitSteps:
    """Predicts a step; `tapes` are those of the recipe's variant."""
    samples = step.timeline(shape, tapes, recipe, layout, workspace_bytes).samples
    peaks, ends = samples[::2], samples[1::2]
    places = list(_places(shape, recipe))
    assert len(places) == len(peaks) - 1, "the walk through a step marks other units than these"
    stretches = tuple(
        Stretch(*place, top.total, end.total, _seconds(place, shape, recipe, layout, gpu))
        for place, top, end in zip(places, peaks[1:], ends[1:], strict=True)
    )
    between = step.predict(shape, tapes, recipe, layout, workspace_bytes).steady
    first, *others = stretches
    first = replace(first, peak_bytes=max(first.peak_bytes, between))  # FSDP1 frees gradients when it begins
    return UnitSteps(between, (first, *others), tuple(_sent_by_unit(shape, recipe, layout)))


Place = tuple[int, Phase, str, int | None]


def _places(shape: ModelShape, recipe: Recipe) -> Iterator[Place]:
    """The stretches in the order in which `step.timeline` marks them."""
    layers = [(shape.blocks[block].name, index) for index, block in enumerate(step.block_order(shape))]
    for number in sorted({1, min(2, recipe.accumulation), recipe.accumulation}):
        yield number, "forward", EMBEDDING, None
        yield from ((number, "forward", name, index) for name, index in layers)
        yield number, "forward", HEAD, None
        yield number, "backward", HEAD, None
        yield from ((number, "backward", name, index) for name, index in reversed(layers))
        yield number, "backward", EMBEDDING, None
    yield recipe.accumulation, "update", UPDATE, None


def _seconds(place: Place, shape: ModelShape, recipe: Recipe, layout: Layout, gpu: Gpu | None) -> float | None:
    number, phase, unit, layer = place
    if gpu is None:
        return None
    if phase == "update":
        return speed.update_seconds(shape, recipe, layout, gpu)
    reduces = number > recipe.accumulation - communication.reduces_per_step(recipe, layout)
    (first, *others), head = speed.unit_seconds(shape, recipe, layout, gpu, reduces)
    run = [index for index in range(len(shape.blocks)) if index not in shape.untraced]
    blocks, last = others[: len(run)], others[len(run) :]
    if layer is not None:
        parts = [blocks[run.index(step.block_order(shape)[layer])]]
    else:
        parts = [first] if unit == EMBEDDING else [head, *last]
    return sum(part.forward if phase == "forward" else part.backward for part in parts)


def _sent_by_unit(shape: ModelShape, recipe: Recipe, layout: Layout) -> Iterator[UnitTraffic]:
    """Traffic by unit name; blocks of one class are added up."""
    by_name: dict[str, UnitTraffic] = {}
    units = communication.units(shape, recipe, layout)
    for index, unit in enumerate(units):
        name = unit_name(unit, index, units)
        gathers = communication.gather(unit, recipe, layout).times(
            communication.gathers_per_step(unit, recipe, layout) * unit.count
        )
        reduces = communication.reduce(unit, recipe, layout).times(
            communication.reduces_per_step(recipe, layout) * unit.count
        )
        if before := by_name.get(name):
            gathers, reduces = before.gathers + gathers, before.reduces + reduces
        by_name[name] = UnitTraffic(name, unit.count + (before.count if before else 0), gathers, reduces)
    yield from by_name.values()
    if (update := communication.update(shape, recipe, layout)) != Traffic():
        yield UnitTraffic(UPDATE, 1, update, Traffic())


def unit_name(unit: Unit, index: int, units: tuple[Unit, ...]) -> str:
    """The class of a block; else `EMBEDDING`, `HEAD`, or `OUTSIDE` for both."""
    if unit.block is not None:
        return unit.name
    is_single = sum(other_unit.block is None for other_unit in units) == 1
    return OUTSIDE if is_single else EMBEDDING if index == 0 else HEAD
