"""The amount of training and the price, by the flags of `accel-fsdp plan`."""

import math
import re
from decimal import Decimal

from accel_fsdp.errors import UsageError
from accel_fsdp.planner.flags import PlanCommand
from accel_fsdp.prediction import cost

UNITS = {"": 0, "K": 3, "M": 6, "B": 9, "T": 12}
"""The powers of ten of a count's last letter."""
COUNT = r"(?P<number>(?:\d{1,3}(?:,\d{3})+|\d[\d_]*)(?:\.\d+)?(?:e\d{1,2})?)\s*(?P<unit>[a-z]?)"
"""A comma parts thousands: `1,5B` may be 1.5 billion, and is refused."""
LONGEST = 40
MOST = 10**18
"""The largest plausible number of tokens; beyond, a count is taken for a typing error."""


def count_of(text: str) -> int:
    """Parses a count: `2B` and `2e9` are 2,000,000,000, `1.5T` is 1,500,000,000,000."""
    match = re.fullmatch(COUNT, text.strip(), re.IGNORECASE | re.ASCII) if len(text) <= LONGEST else None
    power = UNITS.get(match["unit"].upper()) if match else None
    exact = Decimal(re.sub("[_,]", "", match["number"])).scaleb(power) if match and power is not None else Decimal(0)
    if exact < 1 or exact > MOST or exact != int(exact):
        raise UsageError(
            f"--tokens {text[:LONGEST]} is not a number of tokens",
            why="it has to be a whole number above 0; K, M, B and T mean 10^3, 10^6, 10^9 and 10^12",
            fix="--tokens 2B, --tokens 500M, --tokens 1.5T or --tokens 2000000000",
        )
    return int(exact)


def work_of(command: PlanCommand) -> cost.Work:
    """The amount of training, as far as the flags give it; refuses amounts and prices that can't be."""
    tokens, price = command.tokens, command.price
    if price is not None and not 0 <= price < math.inf:
        raise UsageError(f"--price {price}", why="it has to be 0 or more", fix="--price 2.5")
    if price is not None and not (tokens or command.args):
        raise UsageError("--price without --tokens", why="nothing says what is trained", fix="--tokens 2B")
    return cost.Work(count_of(tokens) if tokens is not None else 0)
