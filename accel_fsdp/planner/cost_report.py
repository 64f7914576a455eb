"""The cost of a job in words and numbers. Text has the range of each amount, JSON its upper end."""

from typing import Any

from accel_fsdp.prediction import cost
from accel_fsdp.units import counted, two_digits

FULL_ROWS = (
    "Rows are packed or as long as they may be: shorter ones take as many steps, and train on fewer tokens. "
    "Loading, preparing data, saving and exporting come on top."
)
UNKNOWN = "The number of steps is unknown: give --tokens, or max_steps in the arguments."


def sentence(spent: cost.Cost) -> str:
    amounts = [hours(spent.hours), f"{span(spent.gpu_hours)} GPU-hours"]
    if spent.money is not None:
        amounts.append(f"at {spent.price:,.10g} each they cost {span(spent.money)}")
    steps = f"{counted(spent.steps, 'step')} of {spent.tokens // spent.steps:,} tokens"
    return f"All of it takes {steps}: {'; '.join(amounts)}."


def hours(amount: cost.Range) -> str:
    """A time as `7.4 to 12 hours`, in minutes if it may be below one hour."""
    return f"{span(amount)} hours" if amount[0] >= 1 else f"{span((amount[0] * 60, amount[1] * 60))} minutes"


def span(amount: cost.Range) -> str:
    """An amount as `100 to 160`."""
    return " to ".join(dict.fromkeys(map(two_digits, amount)))


def as_json(spent: cost.Cost) -> dict[str, Any]:
    return {
        "steps": spent.steps,
        "tokens": spent.tokens,
        "hours_at_most": spent.hours[1],
        "gpu_hours_at_most": spent.gpu_hours[1],
        "price_per_gpu_hour": spent.price,
        "money_at_most": spent.money[1] if spent.money else None,
    }
