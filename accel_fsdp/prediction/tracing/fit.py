"""Fits tapes to recorded runs: every size as a polynomial, exactly."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

from sympy import Matrix

from accel_fsdp.errors import UserError, first_line
from accel_fsdp.models import parallel_plans, trained_class
from accel_fsdp.prediction import TraceRecord
from accel_fsdp.prediction.memory import SHIPPED, At, Event, Size, Tape, Tapes, Variant
from accel_fsdp.prediction.tracing.recorder import Recorder
from accel_fsdp.prediction.tracing.run import RecordedRun

STEP = 64
"""Lengths are multiples of this: attention kernels round some small tensors up to 32."""
LENGTHS = (64, 128, 192, 256)
RANKS = (8, 24, 40)
ALONE = ("fixed", "tokens", "rows_length2")
SEVERAL = (*ALONE, "length", "length2", "rows")
RANKED = ("rank", "rank_tokens")
SILENT = Tape((), (), Size())
"""The tape of a block that text doesn't pass through."""
LOG = logging.getLogger("torch._subclasses.fake_tensor")
"""torch's log of tracebacks about fake tensors: the error is reported in a line."""
WITHOUT_PLAN = "accel-fsdp config makes a YAML for this one without a plan"


def record_model(name: str, config: Any, variants: tuple[str, ...] = SHIPPED) -> TraceRecord:
    """The shape of a config's model and its tapes in some variants, recorded again.

    Raises:
        UserError: transformers can't build a model from the config, or its layers' memory is not a polynomial of the
        batch.
    """
    kind = f"{name} ({config.model_type})"
    if config.is_encoder_decoder:
        why, fix = "a plan is about one stack of layers", f"choose a decoder-only model; {WITHOUT_PLAN}"
        raise UserError(f"{kind} has an encoder and a decoder", why=why, fix=fix)
    if trained_class(config) is None or not hasattr(config.get_text_config(), "vocab_size"):
        why, fix = "a plan is about sequences of tokens", f"choose a language model; {WITHOUT_PLAN}"
        raise UserError(f"{kind} is not a language model", why=why, fix=fix)
    tapes: dict[str, Tapes] = {}
    for variant in variants:
        known = Variant.of(variant)
        try:
            with patch.object(LOG, "disabled", True), _ranks_for(known):
                recorder = Recorder(name, config, known)
                tapes[variant] = record(recorder)
        except UserError:
            raise
        except Exception as error:  # any error of the model's own code
            raise UserError(
                f"what {name} allocates can't be recorded: {first_line(error) or type(error).__name__}",
                why="its memory depends on more than rows, length and LoRA rank, or its code can't run without data",
                fix="plan for a model of the same shape; accel-fsdp plan --model llama-3.1-8b shows what is known",
            ) from error
    return recorder.shape, tapes


def _ranks_for(variant: Variant) -> AbstractContextManager[None]:
    if variant.tensor == variant.experts == 1:
        return nullcontext()
    parallel_plans.check_version(f"tp {variant.tensor}" if variant.tensor > 1 else f"ep {variant.experts}")
    from accel_fsdp.prediction.tracing.axes import ranks_for  # DTensor takes a second to import

    return ranks_for(variant)


def record(recorder: Recorder) -> Tapes:
    """All tapes of one variant."""
    window, untraced = recorder.shape.window, recorder.shape.untraced
    blocks = range(len(recorder.shape.blocks))
    takes_mask = [block not in untraced and _takes_mask_late(recorder, block, window) for block in blocks]
    return Tapes(
        blocks=tuple(SILENT if block in untraced else record_block(recorder, block) for block in blocks),
        masked=tuple(record_block(recorder, block, window) if takes_mask[block] else None for block in blocks),
        embedding=fit(recorder.embedding, LENGTHS, False),
        head=fit(recorder.head, LENGTHS, False),
    )


def record_block(recorder: Recorder, block: int, beyond: int = 0) -> Tape:
    """The tape of one kind of block, for sequences of at least `beyond` if that is given."""
    window = recorder.shape.window
    start = -(-beyond // STEP) * STEP
    step = STEP if beyond or not 0 < window <= 4 * STEP else window // 5
    lengths = tuple(start + step * number for number in range(1, 5))
    return fit(lambda at: recorder.block(block, at), lengths, recorder.variant.method != "full")


def _takes_mask_late(recorder: Recorder, block: int, window: int) -> bool:
    """Whether a block gets a mask for long sequences only."""
    if not window:
        return False
    rank = RANKS[0] if recorder.variant.method != "full" else 0
    before, after = (recorder.masked(block, At(1, length, rank)) for length in (window // 2, window + STEP))
    return after and not before


def fit(run: Callable[[At], RecordedRun], lengths: tuple[int, ...], ranked: bool) -> Tape:
    """Runs at some batches, solves for the polynomials, and checks them at a batch of other rows, length and rank.

    Raises:
        RuntimeError: an operation's size is not such a polynomial, or the runs differ.
    """
    ranks = RANKS if ranked else (0, 0, 0)
    cached = cache(run)
    try:  # most sizes depend on the tokens only; a batch of other rows proves it
        tape = _fit(cached, (2, 2, 4), lengths, ranks, ALONE)
    except RuntimeError:
        tape = _fit(cached, (2, 3, 4), lengths, ranks, SEVERAL)
    at = At(1, lengths[3], ranks[2])
    if _replays(tape, cached(at), at):
        return tape
    return replace(tape, alone=_fit(cached, (1, 1, 1), lengths, ranks, ALONE))


def _replays(tape: Tape, raw: RecordedRun, at: At) -> bool:
    """Whether a tape reproduces the recording at one batch."""
    sides = [[(e.sign, e.size.exact(at)) for e in side] for side in (tape.forward, tape.backward, tape.first)]
    return sides == [raw.forward, raw.backward, [*raw.first]] and tape.keeps_input == raw.keeps_input


def _fit(
    run: Callable[[At], RecordedRun],
    rows: tuple[int, ...],
    lengths: tuple[int, ...],
    ranks: tuple[int, ...],
    terms: tuple[str, ...],
) -> Tape:
    firsts = dict.fromkeys(rows[:2])
    points = [At(batch, length, ranks[0]) for batch in firsts for length in lengths[:3]]
    if ranks[0]:
        points += [At(rows[0], length, ranks[1]) for length in lengths[:2]]
        terms = (*terms, *RANKED)
    check = At(rows[2], lengths[3], ranks[2])
    raws = [run(at) for at in (*points, check)]
    for at, raw in zip((*points, check), raws, strict=True):
        _check_same(raws[0], raw, at)
    sizes: dict[tuple[int, ...], Size] = {}

    def size(values: tuple[int, ...], by: str) -> Size:
        if values not in sizes:
            sizes[values] = _solve(tuple(points), terms, values[:-1])
            if sizes[values].exact(check) != values[-1]:
                raise RuntimeError(f"{by}: {values[-1]} bytes at {check}, not {sizes[values].exact(check)}")
        return sizes[values]

    columns = zip(*([*raw.forward, *raw.backward, *raw.first] for raw in raws), strict=True)
    events = [
        Event(column[0][0], size(tuple(bytes_then for _, bytes_then in column), by))
        for column, by in zip(columns, raws[0].names, strict=True)
    ]
    split, end = len(raws[0].forward), len(raws[0].forward) + len(raws[0].backward)
    output = size(tuple(raw.output for raw in raws), "the output")
    forward, backward, first = (tuple(side) for side in (events[:split], events[split:end], events[end:]))
    return Tape(forward, backward, output, raws[0].keeps_input, first=first)


def _check_same(first: RecordedRun, second: RecordedRun, at: At) -> None:
    """Checks that two runs have the same operations in the same order."""
    signs, signs_at = ([sign for sign, _ in (*raw.forward, *raw.backward, *raw.first)] for raw in (first, second))
    if first.names == second.names and signs == signs_at and first.keeps_input == second.keeps_input:
        return
    pairs = enumerate(zip(first.names, second.names, strict=False))
    number = next((n for n, (name, name_at) in pairs if name != name_at), min(len(signs), len(signs_at)) - 1)
    raise RuntimeError(f"runs differ at {at}: event {number} is {second.names[number]}, not {first.names[number]}")


def _solve(points: tuple[At, ...], terms: tuple[str, ...], values: tuple[int, ...]) -> Size:
    factors = ((factor.p, factor.q) for factor in _inverse(points, terms) * Matrix(values))
    return Size(**{term: p if q == 1 else p / q for term, (p, q) in zip(terms, factors, strict=True)})


@cache
def _inverse(points: tuple[At, ...], terms: tuple[str, ...]) -> Matrix:
    """The inverse of the matrix of each term at each point."""
    return Matrix([[round(Size(**{term: 1}).exact(at)) for term in terms] for at in points]).inv()
