"""Allocations of one block, or of the head with its loss, in forward and backward, for any batch. Pure.

A tape is recorded once by `recorder.py`, unsharded, and replayed here for any micro-batch, sequence length and LoRA
rank: every size on it is a polynomial in them. So a peak is exact, although it is only piecewise linear in the tokens.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from operator import mul
from typing import Any, Literal, NamedTuple

from accel_fsdp.config import LOW_DTYPES, Engine, Method
from accel_fsdp.job import SHARDING_KINDS, Layout, LoraTargets, Recipe
from accel_fsdp.models import state_bytes

ROUND_BYTES = 512
"""The granularity of CUDA's caching allocator (c10/cuda/CUDACachingAllocator: kMinBlockSize)."""


class At(NamedTuple):
    """The batch that a tape is replayed at: rows of the micro-batch, sequence length, LoRA rank (0 without LoRA)."""

    rows: int
    length: int
    rank: int = 0


class Size(NamedTuple):
    """Bytes as a polynomial in rows, length and rank; `tokens` is the coefficient of rows · length."""

    fixed: float = 0
    tokens: float = 0
    length: float = 0
    rows_length2: float = 0
    length2: float = 0
    rank: float = 0
    rank_tokens: float = 0
    rows: float = 0

    def exact(self, at: At) -> float:
        """The bytes for one batch."""
        rows, length, rank = at
        tokens = rows * length
        powers = (1, tokens, length, tokens * length, length**2, rank, rank * tokens, rows)  # in the fields' order
        return float(sum(map(mul, self, powers)))

    def at(self, at: At) -> int:
        """The bytes for one batch, as the allocator rounds them."""
        return -(-round(self.exact(at)) // ROUND_BYTES) * ROUND_BYTES


class Event(NamedTuple):
    """One allocation (`sign` 1) or release (-1)."""

    sign: int
    size: Size


@dataclass(frozen=True)
class Tape:
    """The events of one module's forward and backward, its input and the gradient of its output held by the caller.

    `forward` ends with the output and everything saved for backward alive. `backward` ends with all of that freed and
    the gradient of the input alive; its parameters' gradients are `grads`, as separate events, which keep their
    position among the others: an event with sign 0 marks where a gradient of that many bytes is created. Autograd frees
    the gradient of the output, or reuses it, before the end of `backward`. `backward` then has its release there, and
    ends with an allocation of the same size, so that its levels are right when the caller holds the gradient.
    `keeps_input` says that backward reads the input; without it the input is free when forward has returned. `alone` is
    the tape for a micro-batch of one row, where some copies aren't needed; None if it equals this one. `first`, which
    only blocks have, is a forward that saves nothing, as the first one under checkpointing; its output stays alive.
    """

    forward: tuple[Event, ...]
    backward: tuple[Event, ...]
    output: Size
    keeps_input: bool = True
    alone: "Tape | None" = None
    first: tuple[Event, ...] = ()

    def __hash__(self) -> int:
        """The hash of a part: tapes have hundreds of events, and are keys of caches."""
        return hash((len(self.forward), len(self.backward), self.output))

    def of(self, rows: int) -> "Tape":
        return self.alone if rows == 1 and self.alone is not None else self


@dataclass(frozen=True)
class Tapes:
    """A model in one variant: a tape for each block of its `ModelShape`, and for what is before and after the blocks.

    `embedding` goes from the token ids to the first block's input, with the attention mask and rotary tables, which
    live as long as its output. `head` goes from the last block's output to the loss. `masked` are the blocks where
    sliding attention needs a mask, None where it never does.
    """

    blocks: tuple[Tape, ...]
    masked: tuple[Tape | None, ...]
    embedding: Tape
    head: Tape

    def block(self, index: int, length: int, window: int) -> Tape:
        """The tape of a block for `length` tokens: transformers masks a sliding window in rows of at least its length.

        Flash attention takes the window as a number and needs no mask, so its `window` is 0.
        """
        masked = self.masked[index]
        return self.blocks[index] if masked is None or not window or length < window else masked


VARIANT_NAME = re.compile(
    r"(?P<weights>bf16|fp32)(?P<autocast>-amp)?-(?P<method>full|lora|qlora)(?P<adapters>32)?(@(?P<targets>attention))?"
    r"(?P<dropout>\+dropout)?-(?P<attention>sdpa|eager|packed)(?P<liger>-liger)?(-tensor(?P<tensor>\d+))?"
    r"(-experts(?P<experts>\d+))?"
)


class Variant(NamedTuple):
    """The settings that decide a tape besides the model.

    Weights and adapters are as they are when a block computes; "bf16" stands for both 16-bit dtypes. `adapters` may be
    wider than `weights`: PEFT makes them float32 and autocast casts them at each use. `tensor` and `experts` are the
    sizes of tensor and expert parallelism.
    """

    weights: Literal["bf16", "fp32"] = "bf16"
    autocast: bool = True
    method: Method = "full"
    adapters: Literal["bf16", "fp32"] = "bf16"
    attention: Literal["sdpa", "eager", "packed"] = "sdpa"
    targets: LoraTargets = "all"
    dropout: bool = False
    liger: bool = False
    tensor: int = 1
    experts: int = 1

    @property
    def name(self) -> str:
        """Such as "bf16-amp-lora32-sdpa": weights, autocast, method, its details, attention, fused kernels, ranks."""
        tags = "32" if self.method != "full" and self.adapters != self.weights else ""
        tags += ("" if self.targets == "all" else f"@{self.targets}") + ("+dropout" if self.dropout else "")
        ends: list[str] = ["liger"] if self.liger else []
        ends += [f"{axis}{getattr(self, axis)}" for axis in ("tensor", "experts") if getattr(self, axis) > 1]
        return "-".join((self.weights, *(["amp"] if self.autocast else []), self.method + tags, self.attention, *ends))

    @property
    def weight_bytes(self) -> int:
        """Bytes per element of the weights that a block computes with, and of their gradients."""
        return state_bytes.LOW if self.weights == "bf16" else state_bytes.MASTER

    @staticmethod
    @lru_cache
    def of(name: str) -> "Variant":
        word: dict[str, Any] = VARIANT_NAME.fullmatch(name).groupdict()  # type: ignore[union-attr]
        adapters = "fp32" if word["adapters"] else word["weights"]
        flags = {flag: word[flag] is not None for flag in ("autocast", "dropout", "liger")}
        sizes = {axis: int(word[axis] or 1) for axis in ("tensor", "experts")}
        return Variant(**{**word, **flags, **sizes, "adapters": adapters, "targets": word["targets"] or "all"})


_PLAIN = (
    *("bf16-amp-full-sdpa", "bf16-full-sdpa", "fp32-amp-full-sdpa", "fp32-full-sdpa"),
    *("bf16-amp-lora-sdpa", "bf16-amp-lora32-sdpa", "bf16-lora-sdpa", "bf16-lora32-sdpa", "fp32-amp-lora-sdpa"),
    *("bf16-amp-qlora-sdpa", "bf16-amp-qlora32-sdpa", "bf16-qlora-sdpa", "bf16-qlora32-sdpa", "fp32-amp-qlora-sdpa"),
)
_LIGER = ("bf16-amp-full-sdpa", "bf16-full-sdpa", "bf16-amp-lora-sdpa", "bf16-amp-lora32-sdpa", "bf16-amp-qlora-sdpa")
SHIPPED = tuple(
    known._replace(dropout=dropout, liger=liger).name
    for name, known in ((name, Variant.of(name)) for name in _PLAIN)
    for dropout in ((False,) if known.method == "full" else (True, False))
    for liger in ((False, True) if name in _LIGER and dropout is (known.method != "full") else (False,))
)
"""The variants that are bundled for the models of the catalogue: adapters with dropout, as the script has it, and
without; Liger's kernels under FSDP, DDP and DeepSpeed."""


def variant_for(recipe: Recipe, layout: Layout) -> str:
    """The name of the variant that a recipe runs in a layout.

    PEFT's layers around divided ones can't be recorded: with adapters, tensor parallelism divides no activations here.
    """
    tensor = layout.tensor if recipe.method == "full" else 1
    return variant_of(recipe, layout.wrapper, tensor, layout.experts)


def variant_of(recipe: Recipe, engine: str, tensor: int = 1, experts: int = 1) -> str:
    """The name of the variant that a recipe runs under an engine, as `Layout.engine` names them.

    FSDP's mixed precision hands 16-bit copies of all parameters to the block, DeepSpeed keeps such copies; Accelerate
    runs both precisions under autocast, except DeepSpeed's (accelerator.py, `native_amp`). DDP and one GPU compute from
    the weights as loaded, and PEFT's adapters are float32 there (`autocast_adapter_dtype`). Flash attention saves the
    same tensors as the kernel that `sdpa` uses without a mask; "packed" is `sdpa` with the mask of packed rows.
    """
    mixed = recipe.precision != "no"
    sharded = engine in SHARDING_KINDS
    low = recipe.dtype in LOW_DTYPES or (mixed and sharded)
    # under FSDP1 adapters are separate flat parameters
    kept_wide = not sharded or (engine is not Engine.DEEPSPEED and not mixed)
    return Variant(
        weights="bf16" if low else "fp32",
        autocast=mixed and engine is not Engine.DEEPSPEED,
        method=recipe.method,
        adapters="fp32" if recipe.method != "full" and (kept_wide or not low) else "bf16" if low else "fp32",
        attention="eager" if recipe.attention == "eager" else "packed" if recipe.masks_documents else "sdpa",
        targets="all" if recipe.method == "full" else recipe.lora_targets,
        dropout=recipe.method != "full" and recipe.lora_dropout,
        liger=recipe.liger,
        tensor=tensor,
        experts=experts,
    ).name


def levels(events: tuple[Event, ...], at: At) -> list[int]:
    """The bytes alive after each event, counted from the start of the segment."""
    sizes = {event.size: event.size.at(at) for event in set(events)}
    return list(accumulate(sign * sizes[size] for sign, size in events))


class Replay(NamedTuple):
    """One tape at one batch, in bytes above those before the segment; gradients of parameters are separate.

    `forward_end` holds the output and all saved tensors; `grad_bytes` are those of all gradients. `early_peak` is the
    peak of backward before a parameter's first gradient is created, where a head's own backward follows the loss's;
    `late_peak` includes `late_grad_bytes` of gradients created by then. `adding_peak` is the peak of backward if each
    gradient is added to an older one at once.
    """

    forward_peak: int
    forward_end: int
    output: int
    grad_bytes: int
    keeps_input: bool
    early_peak: int
    late_peak: int
    late_grad_bytes: int
    adding_peak: int

    @property
    def backward_peak(self) -> tuple[int, int]:
        """The peak of the whole backward, and the bytes of gradients in it."""
        return max((self.early_peak, 0), (self.late_peak, self.late_grad_bytes), key=lambda peak: peak[0])


@lru_cache(1024)
def replay(tape: Tape, at: At) -> Replay:
    """Replays a tape once, so that a model of any depth costs no more than one block."""
    forward = levels(tape.forward, at)
    alive = grad_bytes = adding = 0
    early, late = 0, (0, 0)  # the highest points, of the second with the share of gradients in it
    sizes = {event.size: event.size.at(at) for event in set(tape.backward)}
    for sign, polynomial in tape.backward:
        size = sizes[polynomial]
        alive += sign * size
        grad_bytes += 0 if sign else size
        adding = max(adding, alive if sign else alive + size)
        if not grad_bytes:
            early = max(early, alive)
        if grad_bytes and alive + grad_bytes > late[0]:
            late = alive + grad_bytes, grad_bytes
    end = forward[-1] if forward else 0
    peak, output = max(forward, default=0), tape.output.at(at)
    return Replay(peak, end, output, grad_bytes, tape.keeps_input, early, *late, adding)


class SplitReplay(NamedTuple):
    """A block's backward in two parts, the first up to the next gradient after its experts', in bytes as in `Replay`.

    `peak` is the first part's, with `peak_grad_bytes` of gradients; `level` is the remaining memory besides the
    `grad_bytes` of the experts' gradients; `later_peak` and `later_grad_bytes` belong to the second part, without the
    experts' gradients.
    """

    peak: int = 0
    peak_grad_bytes: int = 0
    level: int = 0
    grad_bytes: int = 0
    later_peak: int = 0
    later_grad_bytes: int = 0


@lru_cache(256)
def split_replay(tape: Tape, at: At, experts: frozenset[int]) -> SplitReplay:
    """Replays a backward, split at the gradients with as many bytes as those of the experts."""
    events = [(event.sign, event.size.at(at)) for event in tape.backward]
    places = [index for index, (sign, size) in enumerate(events) if not sign and size in experts]
    if not places:
        return SplitReplay()
    after = (index for index, (sign, _) in enumerate(events) if not sign and index > places[-1])
    end = next(after, len(events))  # the router's gradient, after that of the experts' input
    alive = grad_bytes = others = 0
    early, late, level = (0, 0), (0, 0), 0
    for index, (sign, size) in enumerate(events):
        alive += sign * size
        grad_bytes += 0 if sign else size
        others += 0 if sign or index in places else size
        if index < end:
            early, level = max(early, (alive + grad_bytes, grad_bytes)), alive
        else:
            late = max(late, (alive + others, others))
    return SplitReplay(*early, level, grad_bytes - others, *late)
