"""Converts tapes to requests to an allocator at one batch: each release is matched with its allocation. Pure."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import count
from typing import NamedTuple

from accel_fsdp.job import Recipe
from accel_fsdp.models import state_bytes
from accel_fsdp.prediction.memory import losses, shards
from accel_fsdp.prediction.memory.losses import Loss
from accel_fsdp.prediction.memory.replay import tape_of_block, tape_of_head
from accel_fsdp.prediction.memory.shape import ModelShape
from accel_fsdp.prediction.memory.traces import ROUND_BYTES, At, Event, Tape, Tapes


class Request(NamedTuple):
    """One event of a tape: `slot` is allocated with `size` bytes or, if that is 0, freed.

    `grad`: a parameter's. `brief`: it is freed at once.
    """

    slot: int
    size: int
    grad: bool = False
    brief: bool = False


class Script(NamedTuple):
    """A tape at one batch as requests.

    `first` is a forward that saves nothing, `first_output` its output; `left` is the gradient of the input after
    backward.
    """

    first: tuple[Request, ...]
    first_output: int | None
    forward: tuple[Request, ...]
    backward: tuple[Request, ...]
    output: int
    left: int | None


UPSTREAM = -1
"""The slot of the gradient of a block's output, which its caller made."""


@lru_cache(64)
def script_of(tape: Tape, at: At) -> Script:
    """Matches each release on a tape with the latest allocation of its size."""
    live: dict[tuple[float, ...], list[int]] = {}
    forward = list(_requests(tape.forward, at, live, 0))
    open_slots = live.get(tape.output, [])
    output = open_slots[-1] if open_slots else UPSTREAM
    if tape.output.at(at):
        live.setdefault(tape.output, []).insert(0, UPSTREAM)
    events = tape.backward
    backward = list(_requests(events, at, live, len(forward)))
    if events and events[-1].sign > 0 and any(request.slot == UPSTREAM for request in backward):
        slot = backward.pop().slot  # a placeholder for the tensors that the caller holds
        live[events[-1].size].remove(slot)
    rest = [slot for slots in live.values() for slot in slots if slot != UPSTREAM]
    first = tuple(_requests(tape.first or tape.forward, at, {}, 0))
    return Script(first, _remaining_slot(first), tuple(forward), tuple(backward), output, rest[-1] if rest else None)


def _remaining_slot(requests: Sequence[Request]) -> int | None:
    """The slot that remains after a forward that saves nothing."""
    alive: dict[int, None] = {}
    for slot, size, *_ in requests:
        if size:
            alive[slot] = None
        else:
            alive.pop(slot, None)
    return next(reversed(alive), None)


def _requests(
    events: Sequence[Event], at: At, live: dict[tuple[float, ...], list[int]], first: int
) -> Iterator[Request]:
    for slot, event in enumerate(events, start=first):
        if event.sign < 0:
            slots = live.get(event.size)
            if slots:
                yield Request(slots.pop(), 0)
        elif event.sign:
            live.setdefault(event.size, []).append(slot)
            yield Request(slot, event.size.at(at))
        else:
            yield Request(slot, event.size.at(at), grad=True)


def with_loss(script: Script, loss: Loss, logits: int) -> Script:
    """The script of a head with the loss of a tape replaced by `loss`; `logits` is their number.

    The tape's loss begins with the upcast copy and ends with the gradient in the logits' dtype. Earlier, later and
    smaller requests are kept.
    """
    widths = loss.widths
    float32_bytes, gradient_bytes = 4 * logits, widths["d"] * logits

    def has(request: Request, *sizes: int) -> bool:
        return not request.grad and any(size <= request.size < size + ROUND_BYTES for size in sizes)

    first = next((n for n, request in enumerate(script.forward) if has(request, float32_bytes)), None)
    last = next((n for n, request in reversed(list(enumerate(script.backward))) if has(request, float32_bytes)), None)
    alive = {request.slot: request for request in script.forward[:first]}  # a release has no size
    logits_slot = next((slot for slot in reversed(alive) if has(alive[slot], gradient_bytes)), None)
    low_places = [index for index, request in enumerate(script.backward) if has(request, gradient_bytes)]
    ends = [index for index in low_places if last is not None and index > last]
    if first is None or logits_slot is None or not ends:
        return script  # float32 logits are their own upcast copy
    names = {"l": logits_slot, "d": script.backward[ends[0]].slot}
    later = (*script.forward[first:], *script.backward)
    large = {request.slot for request in later if has(request, gradient_bytes, float32_bytes)} | {logits_slot}
    slots = count(max(large) + 1_000)

    def requests(words: str) -> Iterator[Request]:
        for word in words.split():
            sign, name = word[0], word[1]
            slot = names[name] if name in names else names.setdefault(name, next(slots))
            if sign == "+":
                yield Request(slot, widths[name] * logits)
            else:
                yield Request(slot, 0)

    forward = [*script.forward[:first], *requests(loss.forward)]
    forward += [request for request in script.forward[first:] if request.slot not in large]
    backward = list(requests(loss.backward))
    backward += [
        request for request in script.backward[ends[0] + 1 :] if request.slot not in large or request.slot == names["d"]
    ]
    backward += requests(loss.after)
    return script._replace(forward=tuple(forward), backward=tuple(backward))


def _with_brief(script: Script) -> Script:
    """The script, with an allocation and its immediate release merged into one request."""
    first, forward, backward = map(_join_requests, (script.first, script.forward, script.backward))
    return script._replace(first=first, forward=forward, backward=backward)


def _join_requests(requests: Sequence[Request]) -> tuple[Request, ...]:
    joined: list[Request] = []
    for request in requests:
        last = joined[-1] if joined else None
        if last is not None and not request.size and last.slot == request.slot and last.size and not last.grad:
            joined[-1] = last._replace(brief=True)
        else:
            joined.append(request)
    return tuple(joined)


class ModelScripts(NamedTuple):
    """A model's scripts at one batch. `head` is None if fused kernels compute the loss; `has_loss`: its loss
    differs from the tape's.
    """

    embedding: Script
    blocks: tuple[Script, ...]
    head: Script | None
    has_loss: bool

    @staticmethod
    def of(shape: ModelShape, tapes: Tapes, recipe: Recipe) -> "ModelScripts":
        rows = recipe.rows
        at = At(rows, recipe.length, 0 if recipe.method == "full" else recipe.lora_rank)
        kinds = range(len(shape.blocks))
        blocks = tuple(script_of(tape_of_block(shape, tapes, recipe, kind).of(rows), at) for kind in kinds)
        tape = tape_of_head(tapes, recipe)
        head = script_of(tape.of(rows), at) if tape else None
        loss = None if recipe.chunked_loss else losses.loss_of(recipe)
        has_loss = bool(head and loss and shards.compute_bytes(recipe) == state_bytes.LOW)
        if head and loss and has_loss:
            head = with_loss(head, loss, shape.vocab * rows * recipe.length)
        embedding = _with_brief(script_of(tapes.embedding.of(rows), at))
        return ModelScripts(embedding, tuple(map(_with_brief, blocks)), head and _with_brief(head), has_loss)
