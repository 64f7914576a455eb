"""Allocations of the logits' size in head and loss, in order, for losses that differ from the tapes. Pure."""

from typing import NamedTuple

from accel_fsdp.job import Recipe


class Loss(NamedTuple):
    """Tensors that are allocated ("+") and freed ("-") in forward and backward, each with its bytes per logit.

    The sequence begins with the model's own logits, "l", and ends with their gradient, "d". `after` follows the end of
    the head's backward.
    """

    forward: str
    backward: str
    bytes_per_logit: str
    after: str = ""

    @property
    def widths(self) -> dict[str, int]:
        """Bytes per logit of each tensor, such as {"l": 2, "f": 4}."""
        return {word[0]: int(word[1:]) for word in self.bytes_per_logit.split()}

    @property
    def peaks(self) -> tuple[int, int]:
        """Bytes per logit at the peak of forward and of backward."""
        widths, alive, peaks = self.widths, self.widths["l"], []
        for words in (self.forward, self.backward):
            highest = 0
            for word in words.split():
                alive += widths[word[1]] if word[0] == "+" else -widths[word[1]]
                highest = max(highest, alive)
            peaks.append(highest)
        return peaks[0], peaks[1]


FOAK = Loss("+f -l", "+d -f", "l2 f4 d2")
"""foak, the fused ops of fms-acceleration: only the upcast copy, which the gradient replaces."""


def loss_of(recipe: Recipe) -> Loss | None:
    """The sequence of a recipe's loss; None if the recorded tape has it."""
    return FOAK if recipe.kernels == "foak" else None
