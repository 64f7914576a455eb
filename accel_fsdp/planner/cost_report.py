"""The cost of a job in words and numbers, rounded to the prediction's precision; as a range if it is uncertain."""

from collections.abc import Iterator
from typing import Any

from accel_fsdp.hardware import Gpu
from accel_fsdp.prediction import cost
from accel_fsdp.units import about_gb, about_hours, counted, two_digits

FULL_ROWS = "Rows are packed or as long as they may be: shorter ones take as many steps, and train on fewer tokens."
UNKNOWN = "The number of steps is unknown: give the rows of an epoch, --dataset-rows N, or max_steps in the arguments."
UNCOUNTED = "Loading the model, preparing the data and exporting come on top."


def sentences(spent: cost.Cost, gpu: Gpu) -> Iterator[str]:
    """The cost of a job as lines of one or two sentences."""
    amounts = [f"about {hours(spent.hours)}", f"{span(spent.gpu_hours)} GPU-hours"]
    if spent.money is not None:
        amounts.append(f"at {price(spent)} each they cost {span(spent.money)}")
    yield (
        f"All of it takes {counted(spent.steps, 'step')} of {spent.tokens // spent.steps:,} tokens: "
        f"{'; '.join(amounts)}. {UNCOUNTED}"
    )
    yield energy(spent, gpu)
    if spent.evaluations is not None:  # the script's arguments are known
        yield from _saves(spent.saves)
        yield from _evaluations(spent.evaluations)


def energy(spent: cost.Cost, gpu: Gpu) -> str:
    """The energy of the boards, and its assumptions."""
    return (
        f"Energy: at most {two_digits(spent.most_kwh)} kWh, with every GPU at its {gpu.board_watts:g} W "
        f"({gpu.source}) for the longest of these times; CPUs, network and cooling are not counted."
    )


def price(spent: cost.Cost) -> str:
    return f"{spent.price:,.10g}"


def hours(amount: cost.Span) -> str:
    """A time with its range: `8.7 hours (7.4 to 12)`."""
    unit = 1 if amount.expected >= 1 else 60
    return f"{about_hours(amount.expected)} ({two_digits(amount.least * unit)} to {two_digits(amount.most * unit)})"


def span(amount: cost.Span) -> str:
    """An amount with its range: `120 (100 to 160)`."""
    return f"{two_digits(amount.expected)} ({two_digits(amount.least)} to {two_digits(amount.most)})"


def _saves(saves: cost.Saves | None) -> Iterator[str]:
    if saves is None:
        yield "The arguments save once an epoch, whose steps are unknown without --dataset-rows N."
    elif not saves.count:
        yield "The arguments write no checkpoints."
    else:
        yield (
            f"{counted(saves.count, 'checkpoint')} of {about_gb(saves.each_bytes)}, {saves.at_once:,} on the disk at "
            f"once: {about_gb(saves.disk_bytes)}. {_stall(saves.stall_seconds)}"
        )


def _stall(seconds: cost.Span | None) -> str:
    if seconds is None:
        return (
            "How long training waits for each save is unknown without the disk's speed: --disk-speed GB/S, which "
            "accel-fsdp doctor --folder measures; the hours don't include it."
        )
    if seconds.least < seconds.most:
        return (
            f"Training waits {two_digits(seconds.least)} to {two_digits(seconds.most)} s for each, depending on "
            "whether the machines share the disk's speed; the hours include this, but not gathering."
        )
    wait = two_digits(seconds.most)
    return f"Training waits about {wait} s for each at the disk's speed; the hours include this, but not gathering."


def _evaluations(evaluations: cost.Evaluations) -> Iterator[str]:
    if evaluations.count == 0:
        return
    number = evaluations.count
    count = "Evaluations, whose number is unknown" if number is None else counted(number, "evaluation")
    if evaluations.each_seconds is None:
        yield f"{count}, whose rows are unknown without --eval-rows N: not in the hours."
    else:
        seconds = f"{two_digits(evaluations.each_seconds.least)} to {two_digits(evaluations.each_seconds.most)} s each"
        yield f"{count} of {seconds}{'; not in the hours' if number is None else ', which are in the hours'}."


def as_json(spent: cost.Cost, gpu: Gpu) -> dict[str, Any]:
    """The cost as numbers; `range` is the minimum and maximum."""
    saves, evaluations = spent.saves, spent.evaluations
    numbers: dict[str, Any] = {
        "steps": spent.steps,
        "tokens": spent.tokens,
        **_spans("hours", spent.hours),
        **_spans("gpu_hours", spent.gpu_hours),
        "energy_kwh_at_most": spent.most_kwh,
        "gpu_board_watts": gpu.board_watts,
        "gpu_board_watts_source": gpu.source,
        "price_per_gpu_hour": spent.price,
        **_spans("money", spent.money),
    }
    if saves:
        numbers |= {
            "checkpoints": saves.count,
            "checkpoints_at_once": saves.at_once,
            "checkpoint_bytes": saves.each_bytes,
            "checkpoints_disk_bytes": saves.disk_bytes,
            **_spans("checkpoint_stall_seconds", saves.stall_seconds),
        }
    if evaluations:
        numbers |= {"evaluations": evaluations.count, **_spans("evaluation_seconds", evaluations.each_seconds)}
    return numbers


def _spans(name: str, amount: cost.Span | None) -> dict[str, Any]:
    return {
        name: None if amount is None else amount.expected,
        f"{name}_range": None if amount is None else (amount.least, amount.most),
    }
