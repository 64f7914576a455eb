"""The FLOPs, memory traffic and kernel launches of one GPU, counted kernel by kernel. Pure.

The kernels are those that transformers and PEFT run eagerly. Fused ones (Liger, torch.compile) move less.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from accel_fsdp.job import Recipe
from accel_fsdp.prediction.communication import Amounts
from accel_fsdp.prediction.memory import Block, ModelShape, Parameter, compute_bytes, shards

TILE = 128
"""Rows of a matrix product that a thread block computes at once. On average an expert's last tile is half full."""
WIDTH = 2
"""Bytes per element that the counts below assume; float32 takes twice as many."""
RMS_NORM_BYTES = (36, 76)
"""Memory traffic per element, forward and backward. To float32 (2 + 4), square (4 + 4), mean (4), times its root
(4 + 4), back (4 + 2), times the weight (2 + 2). Backward: the gradients of weight and product (12), to float32 (6),
through the root (20), mean and square (24), their sum (12), back (2). (transformers' LlamaRMSNorm.)"""
LAYER_NORM_BYTES = (4, 10)
"""torch.nn.LayerNorm is one kernel (2 + 2), and two backward: of the input (4 + 2) and of the weights (4)."""
AUTOCAST_BYTES = (16, 16)
"""Autocast's additional bytes: it computes in float32 (2 + 4), and the next product casts back (4 + 2)."""
ROTARY_BYTES = (20, 32)
"""Memory traffic per element of queries and keys: times cosine (2 + 2), half of it negated (2), joined (2 + 2), times
sine (2 + 2), added (4 + 2). Backward: both products (8), the halves split and joined (12), added (12).
(apply_rotary_pos_emb.)"""
GATE_BYTES = (10, 18)
"""Memory traffic per inner element: SiLU (2 + 2) and the product with the other half (4 + 2). Backward: 12 and 6."""
ACTIVATION_BYTES = (4, 6)
"""Memory traffic per inner element without a gate (2 + 2). Backward reads input and gradient."""
RESIDUAL_BYTES = (6, 6)
"""Memory traffic per element of a sum (4 + 2). Backward adds two gradients."""
FUSED_NORM_BYTES, FUSED_ROTARY_BYTES, FUSED_GATE_BYTES = (4, 10), (4, 4), (6, 10)
"""The bytes of fused kernels, which read and write everything once."""
ROUTED_BYTES = (16, 26)
"""Memory traffic per element on its way to an expert and back: gathered (2 + 2), weighted (2 + 2), added to the others
(4 + 4). Backward: spread (2), put in order (8), both factors (10), added where gathered (6)."""
LOOPED_BYTES = 8
"""Memory traffic per element of all hidden states and expert of a loop, backward: a gradient of zeros (2), filled where
the expert's tokens are, and added to those of the other experts (4 + 2)."""
LOSS_BYTES = 30
"""Memory traffic per logit: float32 copy (2 + 4), log-softmax (4 + 4), its gradient (4 + 4), back to half (4 + 2), and
the copy that shifts by one token."""
FUSED_LOSS_BYTES = 6
"""One kernel reads a logit and writes its gradient in its place."""
LORA_BYTES = ((20, 28), (29, 22))
"""Memory traffic per element into and out of an adapted layer, forward and backward, with float32 adapters. In: cast
(2 + 4), dropout (4 + 4 + 1), read (4). Out: written (4), scaled (4 + 4), added (2 + 4 + 4), back (4 + 2). Backward out:
cast (6), scaled (8), read twice (8). In: read (4), written (4), dropout (9), back (6), added (6). (PEFT's
Linear.forward.)"""
UNPACKING_FLOPS = 125
"""Instructions that unpack one weight of 4 bits, in FLOPs of the GPU's float32 peak: a search through NF4's sixteen
values (bitsandbytes' dDequantizeNF4), so memory isn't what bounds it. Calibrated: Mixtral's QLoRA runs
differ from its LoRA runs by little else."""
WIDE_IN_BYTES = 6
"""Memory traffic per element into a 4-bit layer behind a float32 norm: cast to half (4 + 2), and the same backward.
(bitsandbytes' Linear4bit.)"""
WIDE_OUT_BYTES = 6
"""Memory traffic per element out of that layer: its output is cast back to the dtype of its input (2 + 4)."""
KERNELS = {"norm": 7, "rotary": 10, "attention": 4, "inner": 2, "residual": 2, "lora": 7, "packed": 3}
"""How many kernels an eager block launches for each of them."""
EXPERT_KERNELS = 8
"""Kernels per expert of a loop: to find its tokens, gather, weight and add them."""


REMEMBERED = 1024  # batches of one search, for which all layouts compute the same


@dataclass(frozen=True)
class Work(Amounts):
    """FLOPs of products, of those in float32, of attention; bytes through the GPU's memory; kernels launched;
    weights unpacked from 4 bits."""

    matmul_flops: float = 0
    float32_flops: float = 0
    attention_flops: float = 0
    moved_bytes: float = 0
    kernels: float = 0
    unpacked: float = 0

    @property
    def flops(self) -> float:
        return self.matmul_flops + self.float32_flops + self.attention_flops


@lru_cache(REMEMBERED)
def block_work(block: Block, shape: ModelShape, recipe: Recipe) -> tuple[Work, Work]:
    """Forward and backward of one block for one micro-batch.

    A product of `n` weights is 2n FLOPs per token forward and 4n backward: gradients of its input and of its weight,
    of which frozen weights need the first alone.
    """
    tokens = recipe.rows * recipe.length
    total = sum((_product(weight, shape, recipe) for weight in block.products), Work())
    flops = 4 * shape.heads * shape.head_dim * _attended_keys(block, shape, recipe) * tokens
    attention = Work(attention_flops=flops)
    between, between_back = _between_products(block, shape, recipe)
    thin, thin_back = _adapters(block, recipe)
    unpacking = _unpacking(block, recipe)
    backward = total.times(2 if recipe.method == "full" else 1) + attention.times(2) + between_back + thin_back
    return total + attention + between + thin + unpacking, backward + unpacking


@lru_cache(REMEMBERED)
def head_work(shape: ModelShape, recipe: Recipe) -> tuple[Work, Work]:
    """The product with the vocabulary and the loss; a tied head costs the same."""
    tokens = recipe.rows * recipe.length
    product = _product(Parameter("head", (shape.vocab, shape.hidden), "head"), shape, recipe)
    loss_bytes = FUSED_LOSS_BYTES if recipe.liger else LOSS_BYTES
    loss = Work(moved_bytes=loss_bytes / 2 * shape.vocab * tokens, kernels=4)
    return product + loss, product.times(2 if recipe.method == "full" else 1) + loss


def recomputed(forward: Work, block: Block | None, shape: ModelShape, recipe: Recipe) -> Work:
    """The work that checkpointing repeats: the forward pass, up to a block's last product if it isn't reentrant.

    No tensor is saved after the input of that product (torch.utils.checkpoint's early stop).
    """
    weights = block.products if block else ()
    if recipe.checkpointing == "none" or not weights:
        return Work()
    last = _product(weights[-1], shape, recipe)
    return forward + last.times(-1 if recipe.checkpointing == "full" else 0)


def share(weight: Parameter, shape: ModelShape) -> float:
    """The share of a parameter that one token uses."""
    return shape.experts_used / shape.experts if weight.kind == "experts" and shape.experts else 1


def _product(weight: Parameter, shape: ModelShape, recipe: Recipe) -> Work:
    """A product forward: reads its input and its weights, writes its output. Half of each expert's last tile is empty.

    The bytes are added to the time of computing, as a product starts by loading and ends by storing: so short and
    thin ones are less efficient than large ones.
    """
    tokens = recipe.rows * recipe.length
    used = share(weight, shape)
    filled = 1 + TILE / 2 / (tokens * used) if used < 1 else 1
    ends = sum(weight.shape[-2:]) * math.prod(weight.shape[:-2]) * used * tokens
    count = math.prod(weight.shape[:-2])
    return Work(
        matmul_flops=2 * weight.numel * used * tokens * filled,
        moved_bytes=(ends + weight.numel) * compute_bytes(recipe),
        kernels=1 if count > 1 or weight.kind != "experts" else 1 + EXPERT_KERNELS / 3,
    )


Piece = tuple[tuple[float, float], float, float]
"""Bytes per element forward and backward, elements per token, kernels."""


def _between_products(block: Block, shape: ModelShape, recipe: Recipe) -> tuple[Work, Work]:
    tokens = recipe.rows * recipe.length
    pieces = tuple(_pieces(block, shape, recipe))
    kernels = sum(count for _, _, count in pieces)
    scale = tokens * compute_bytes(recipe) / WIDTH
    forward, backward = (sum(width[side] * elements for width, elements, _ in pieces) * scale for side in (0, 1))
    return Work(moved_bytes=forward, kernels=kernels), Work(moved_bytes=backward, kernels=2 * kernels)


def _pieces(block: Block, shape: ModelShape, recipe: Recipe) -> Iterator[Piece]:
    fused = recipe.liger
    attention = sum(weight.inner_width(shape.hidden) for weight in block.products if weight.is_attention)
    queries, keys = shape.attention_widths(block)
    norm_width = 2 if _has_wide_norms(block, recipe) else 1
    yield from _norms(block, shape, queries, keys, recipe)
    if attention and not _has_learned_positions(shape):
        per_element = FUSED_ROTARY_BYTES if fused else _scaled_bytes(ROTARY_BYTES, norm_width)
        yield per_element, queries + keys, 1 if fused else KERNELS["rotary"]
    yield (0, 0), 0, KERNELS["attention"] if attention else 0
    yield _scaled_bytes(RESIDUAL_BYTES, norm_width), 2 * shape.hidden, KERNELS["residual"]
    inner = [
        weight.inner_width(shape.hidden) * math.prod(weight.shape[:-2]) * share(weight, shape)  # one token's matrices
        for weight in block.products
        if not weight.is_attention
    ]
    if inner:
        gated = math.isclose(sum(inner), 3 * min(inner)) or shape.experts > 0
        per_element = (FUSED_GATE_BYTES if fused else GATE_BYTES) if gated else ACTIVATION_BYTES
        yield _scaled_bytes(per_element, norm_width), sum(inner) / (3 if gated else 2), KERNELS["inner"]
    experts = [weight for weight in block.parameters if weight.kind == "experts"]
    if experts:
        yield ROUTED_BYTES, shape.experts_used * shape.hidden, 6
        looped = shape.experts if len(experts[0].shape) == 2 else 0
        yield (0, LOOPED_BYTES), looped * shape.hidden, 0
    if norm_width > 1:
        read_elements = shape.hidden * (len(block.products) - 1 - bool(inner)) + sum(inner) / 3
        yield (WIDE_IN_BYTES, WIDE_IN_BYTES), read_elements, len(block.products)
        yield (WIDE_OUT_BYTES, WIDE_OUT_BYTES), attention - queries + sum(inner) * 2 / 3 + shape.hidden, 0


def _norms(block: Block, shape: ModelShape, queries: float, keys: float, recipe: Recipe) -> Iterator[Piece]:
    """The norms of a block: those with a bias are torch's own, the others are written in Python."""
    fused = recipe.liger
    for norm in block.parameters:
        if norm.kind != "norm" or norm.name.endswith("bias"):
            continue
        norm_width = norm.numel if norm.numel != shape.head_dim else keys if "k_" in norm.name else queries
        if _has_bias(norm, block):
            yield LAYER_NORM_BYTES, norm_width, 1
            if _casts_norms(block, recipe):
                yield AUTOCAST_BYTES, norm_width, 0
        else:
            yield FUSED_NORM_BYTES if fused else RMS_NORM_BYTES, norm_width, 1 if fused else KERNELS["norm"]


def _has_bias(norm: Parameter, block: Block) -> bool:
    return any(parameter.name == norm.name.replace("weight", "bias") != norm.name for parameter in block.parameters)


def _casts_norms(block: Block, recipe: Recipe) -> bool:
    """Whether autocast lets the block's layer norms return float32."""
    return recipe.precision != "no" and any(norm.kind == "norm" and _has_bias(norm, block) for norm in block.parameters)


def _has_wide_norms(block: Block, recipe: Recipe) -> bool:
    """Whether 4-bit layers are given float32."""
    return recipe.method == "qlora" and _casts_norms(block, recipe)


def _adapters(block: Block, recipe: Recipe) -> tuple[Work, Work]:
    """LoRA's thin products and PEFT's work around them: limited by memory traffic rather than FLOPs."""
    forward = backward = Work()
    if recipe.method == "full":
        return forward, backward
    tokens = recipe.rows * recipe.length
    in_float32 = recipe.precision == "no"  # without autocast, float32 adapters compute in float32
    for weight in block.parameters:
        if not weight.is_adapted(recipe.lora_targets):
            continue
        flops = 2 * recipe.lora_rank * sum(weight.shape) * tokens
        thin = Work(float32_flops=flops) if in_float32 else Work(matmul_flops=flops)
        rows, columns = weight.shape
        moved = [Work(moved_bytes=(inputs * columns + outputs * rows) * tokens) for inputs, outputs in LORA_BYTES]
        launched = Work(kernels=KERNELS["lora"])
        forward += thin + moved[0] + launched
        backward += thin.times(2) + moved[1] + launched.times(2)
    return forward, backward


def _unpacking(block: Block, recipe: Recipe) -> Work:
    """Unpacking 4-bit weights for one use: instructions and the written bytes."""
    packed = [weight.numel for weight in block.parameters if shards.is_quantized(weight, recipe)]
    return Work(unpacked=sum(packed), kernels=KERNELS["packed"] * len(packed))


def _scaled_bytes(bytes_: tuple[float, float], factor: float) -> tuple[float, float]:
    return bytes_[0] * factor, bytes_[1] * factor


def _attended_keys(block: Block, shape: ModelShape, recipe: Recipe) -> float:
    """The average number of keys that a token attends to: half of all, fewer in a window; all of them with a mask.

    Where sliding and full layers alternate, the first layer slides, as in Gemma 2 and 3 and gpt-oss.
    """
    if recipe.attention == "eager" or shape.eager_only or recipe.masks_documents:
        return recipe.length
    slides = shape.window and 0 in block.layers
    window = min(shape.window, recipe.length) if slides else recipe.length
    return window - window**2 / (2 * recipe.length)


def _has_learned_positions(shape: ModelShape) -> bool:
    """Whether positions are embedded, and queries and keys not rotated."""
    tables = [table for table in shape.outer if table.kind in ("embedding", "other") and len(table.shape) > 1]
    return len(tables) > 1
