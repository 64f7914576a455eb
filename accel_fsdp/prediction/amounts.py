"""Sums of several quantities at once: bytes sent, work done."""

from operator import add
from typing import TypeVar

Same = TypeVar("Same", bound="Amounts")


class Amounts:
    """Base of dataclasses whose fields are all numbers: they add up, and multiply, field by field."""

    def __add__(self: Same, added: Same) -> Same:
        return type(self)(*map(add, vars(self).values(), vars(added).values()))

    def times(self: Same, count: float) -> Same:
        return type(self)(*(amount * count for amount in vars(self).values()))
