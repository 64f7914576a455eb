"""What is counted in several kinds at once: the bytes that are sent, the work that is done."""

from operator import add
from typing import TypeVar

Same = TypeVar("Same", bound="Amounts")


class Amounts:
    """Base of dataclasses whose fields are all numbers: they add up, and multiply, field by field."""

    def __add__(self: Same, added: Same) -> Same:
        return type(self)(*map(add, vars(self).values(), vars(added).values()))

    def times(self: Same, count: float) -> Same:
        """The same, `count` times over."""
        return type(self)(*(amount * count for amount in vars(self).values()))
