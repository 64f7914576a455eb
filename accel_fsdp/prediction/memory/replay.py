"""Allocations of blocks and head for one recipe: their tapes at its batch, plus those of libraries. Pure."""

from dataclasses import dataclass

from accel_fsdp.config import Engine
from accel_fsdp.job import Layout, Recipe
from accel_fsdp.models import state_bytes
from accel_fsdp.prediction.memory import shards
from accel_fsdp.prediction.memory.shape import ModelShape
from accel_fsdp.prediction.memory.shards import Unit
from accel_fsdp.prediction.memory.traces import (
    ROUND_BYTES,
    At,
    Replay,
    SplitReplay,
    Tape,
    Tapes,
    Variant,
    levels,
    replay,
    split_replay,
    variant_for,
)


@dataclass(frozen=True)
class ReplayedModel:
    """`until_loss` are the bytes that each block keeps until the model's forward ends, also with checkpointing."""

    blocks: tuple[Replay, ...]
    embedding: Replay
    head: Replay
    until_loss: tuple[int, ...]
    splits: tuple[SplitReplay, ...]


def replay_model(shape: ModelShape, tapes: Tapes, recipe: Recipe, layout: Layout) -> ReplayedModel:
    at, blocks = _block_tapes(shape, tapes, recipe)
    units = shards.distinct_units(shape, recipe, layout)
    width = Variant.of(variant_for(recipe, layout)).weight_bytes
    split = zip(blocks, units.experts, strict=True)
    return ReplayedModel(
        tuple(replay(tape, at) for tape in blocks),
        replay(tapes.embedding.of(recipe.rows), at),
        fused_head(shape, recipe) if recipe.liger else replay(tapes.head.of(recipe.rows), at),
        tuple(_cast_bytes(unit, recipe, layout) for unit in units.blocks),
        tuple(split_replay(tape, at, _gradients(experts, width)) for tape, experts in split),
    )


def forward_peaks(shape: ModelShape, tapes: Tapes, recipe: Recipe) -> list[int]:
    """The highest points of the blocks, then of head and loss, in a forward that saves nothing.

    Liger's loss has all logits there: it avoids them only in training.
    """
    at, blocks = _block_tapes(shape, tapes, recipe)
    return [max(levels(tape.first or tape.forward, at), default=0) for tape in (*blocks, tapes.head.of(recipe.rows))]


def _gradients(experts: Unit | None, width: int) -> frozenset[int]:
    """The bytes of the gradients of a block's experts, as tapes round them."""
    trained = (param for param in (experts.parameters if experts else ()) if param.trained)
    return frozenset(-(-param.numel * width // ROUND_BYTES) * ROUND_BYTES for param in trained)


def _block_tapes(shape: ModelShape, tapes: Tapes, recipe: Recipe) -> tuple[At, list[Tape]]:
    """The batch of a recipe, and the tapes of the blocks at its rows and length."""
    at = At(recipe.rows, recipe.length, 0 if recipe.method == "full" else recipe.lora_rank)
    window = 0 if recipe.attention == "flash" else shape.window
    return at, [tapes.block(kind, recipe.length, window).of(recipe.rows) for kind in range(len(shape.blocks))]


def _cast_bytes(unit: Unit, recipe: Recipe, layout: Layout) -> int:
    """Autocast's 16-bit copies of trained float32 weights.

    It keeps them until the model's forward ends (autocast_mode.cpp, `cached_cast`); without recomputation a tape has
    them already. Sharded weights aren't leaves, so they aren't kept.
    """
    casts = recipe.precision != "no" and shards.master_bytes(recipe, layout) == state_bytes.MASTER
    whole = layout.engine in (Engine.NONE, Engine.DDP) and recipe.recomputes
    if not casts or not whole:
        return 0
    return state_bytes.LOW * sum(param.numel for param in unit.parameters if param.trained and len(param.shape) > 1)


def fused_head(shape: ModelShape, recipe: Recipe) -> Replay:
    """Liger's head and loss in one: logits of a part of the tokens at a time, all gradients made in forward.

    (`fused_linear_cross_entropy.py`: the logits of a part are about as large as the hidden states, and
    become their gradient in place.)
    """
    tokens, width = recipe.rows * recipe.length, shards.compute_bytes(recipe)
    parts = -(-shape.vocab // shape.hidden)
    chunk = 1 << (-(-tokens // parts) - 1).bit_length()
    logits = min(chunk, tokens) * shape.vocab * width
    hidden = tokens * shape.hidden * width
    weight = shape.vocab * shape.hidden * width if recipe.method == "full" else 0
    end = hidden + weight
    return Replay(
        forward_peak=hidden + end + logits + weight,
        forward_end=end,
        output=0,
        grad_bytes=weight,
        keeps_input=True,
        early_peak=end,
        late_peak=end,
        late_grad_bytes=0,
        adding_peak=end,
    )
