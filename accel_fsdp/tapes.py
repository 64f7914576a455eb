"""What one block, or the head with its loss, allocates and frees in forward and backward, for any batch. Pure.

A tape is recorded once by `traces.py`, unsharded, and replayed here for any micro-batch, sequence length and LoRA rank:
every size on it is a polynomial in them. So a peak is exact although it is only piecewise linear in the tokens.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

ROUND_BYTES = 512
"""What CUDA's caching allocator rounds a request up to (c10/cuda/CUDACachingAllocator: kMinBlockSize)."""


class At(NamedTuple):
    """Where a tape is replayed: rows of the micro-batch, sequence length, LoRA rank (0 without LoRA)."""

    rows: int
    length: int
    rank: int = 0


class Size(NamedTuple):
    """Bytes as a polynomial in rows, length and rank; `tokens` is what each of rows · length tokens takes."""

    fixed: float = 0
    tokens: float = 0
    length: float = 0
    rows_length2: float = 0
    length2: float = 0
    rank: float = 0
    rank_tokens: float = 0

    def at(self, at: At) -> int:
        """The bytes for one batch, as the allocator rounds them."""
        tokens = at.rows * at.length
        exact = (
            self.fixed
            + self.tokens * tokens
            + self.length * at.length
            + self.rows_length2 * tokens * at.length
            + self.length2 * at.length**2
            + self.rank * at.rank
            + self.rank_tokens * at.rank * tokens
        )
        return -(-round(exact) // ROUND_BYTES) * ROUND_BYTES


class Event(NamedTuple):
    """One allocation (`sign` 1) or release (-1)."""

    sign: int
    size: Size


@dataclass(frozen=True)
class Tape:
    """The events of one module's forward and backward, its input and the gradient of its output held by the caller.

    `forward` ends with the output and everything saved for backward alive. `backward` ends with all of that freed and
    the gradient of the input alive; its parameters' gradients are `grads`, in events of their own, so that their place
    among the others is known: an event with sign 0 marks where the gradient of that many bytes is born.
    """

    forward: tuple[Event, ...]
    backward: tuple[Event, ...]
    output: Size

    def to_json(self) -> dict[str, Any]:
        """What `from_json` reads back; trailing zeros are left out."""
        return {
            "forward": [_short(event) for event in self.forward],
            "backward": [_short(event) for event in self.backward],
            "output": list(self.output),
        }

    @staticmethod
    def from_json(content: dict[str, Any]) -> "Tape":
        """Rebuilds a tape."""
        forward, backward = (tuple(Event(e[0], Size(*e[1:])) for e in content[k]) for k in ("forward", "backward"))
        return Tape(forward, backward, Size(*content["output"]))


def _short(event: Event) -> list[float]:
    numbers = [event.sign, *event.size]
    while not numbers[-1] and len(numbers) > 2:
        numbers.pop()
    return numbers


def levels(events: tuple[Event, ...], at: At) -> list[int]:
    """The bytes alive after each event, counted from the start of the segment."""
    alive, seen = 0, []
    for event in events:
        alive += event.sign * event.size.at(at)
        seen.append(alive)
    return seen


class Replay(NamedTuple):
    """One tape at one batch, in bytes above what was there before the segment; gradients of parameters apart.

    `forward_end` holds the output and all that is saved. `backward_peak` counts the gradients born by then,
    `backward_born` is their share; `born` are all of them.
    """

    forward_peak: int
    forward_end: int
    output: int
    backward_peak: int
    backward_born: int
    backward_end: int
    born: int


def replay(tape: Tape, at: At) -> Replay:
    """Plays a tape once, so that a model of any depth costs no more than one block."""
    forward = levels(tape.forward, at)
    alive = born = peak = born_at_peak = 0
    for event in tape.backward:
        if event.sign:
            alive += event.sign * event.size.at(at)
        else:
            born += event.size.at(at)
        if alive + born > peak:
            peak, born_at_peak = alive + born, born
    end = forward[-1] if forward else 0
    return Replay(max(forward, default=0), end, tape.output.at(at), peak, born_at_peak, alive, born)
