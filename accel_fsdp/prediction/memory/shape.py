"""The shape of a model: everything that memory and time depend on."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from accel_fsdp.job import ATTENTION_LINEAR, LoraTargets
from accel_fsdp.models import Divisible

ParameterKind = Literal["linear", "experts", "embedding", "head", "norm", "other"]
UNKNOWN_DIVISION = Divisible()


@dataclass(frozen=True)
class Parameter:
    """One parameter by its full shape. 4-bit quantisation and LoRA apply to the `kind` of linear layers.

    `cut` is the dimension that tensor parallelism divides, None if each rank has all of it. `dispatched`: expert
    parallelism divides the first dimension instead. `adaptable` is False if PEFT takes the layer's name for experts.
    """

    name: str
    shape: tuple[int, ...]
    kind: ParameterKind
    cut: int | None = None
    dispatched: bool = False
    adaptable: bool = True

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_fused_experts(self) -> bool:
        """Whether it holds several experts; a single expert's weight is a linear layer's."""
        return self.kind == "experts" and len(self.shape) == 3

    def part(self, tensor: int, experts: int) -> "Parameter":
        """The largest rank's part of the parameter under tensor and expert parallelism."""
        place, ranks = (0, experts) if self.dispatched and experts > 1 else (self.cut, tensor)
        if place is None or ranks == 1:
            return self
        shape = (*self.shape[:place], -(-self.shape[place] // ranks), *self.shape[place + 1 :])
        return replace(self, shape=shape)

    @property
    def is_attention(self) -> bool:
        return "attn" in self.name or "attention" in self.name

    def inner_width(self, hidden: int) -> int:
        """The side that isn't the hidden one, whichever comes first (transformers' Conv1D is transposed)."""
        first, second = self.shape[-2:]
        return first if second == hidden else second

    def is_adapted(self, targets: LoraTargets) -> bool:
        """Whether LoRA adapts the parameter in a block: that of any linear layer, or only those of attention."""
        named = targets == "all" or self.name.rpartition(".")[0].rpartition(".")[2] in ATTENTION_LINEAR
        return self.kind == "linear" and self.adaptable and named


@dataclass(frozen=True)
class Block:
    """A layer class that repeats: `parameters` of one instance, and the places of its instances among all layers.

    Two blocks may have one class if layers alternate, such as sliding and full attention, or dense and experts.
    """

    name: str
    layers: tuple[int, ...]
    parameters: tuple[Parameter, ...]

    def __hash__(self) -> int:
        """The hash of a part, as for `ModelShape`."""
        return hash((self.name, self.layers))

    @property
    def products(self) -> tuple[Parameter, ...]:
        """The weights that tokens are multiplied with."""
        return tuple(weight for weight in self.parameters if weight.kind in ("linear", "experts"))


@dataclass(frozen=True)
class ModelShape:
    """The shape of a model, on which memory and time depend.

    `outer` are the parameters outside of the blocks: embeddings, last norm, head. A tied head adds no parameter.
    `buffers_bytes` are stored or computed buffers, on every rank; `stored_buffers` counts those in a checkpoint.
    `experts` and `experts_used` count a layer's experts and those a token goes through, 0 without. `window` is the
    sliding window of the layers that have one, 0 without; `positions` the longest sequence, 0 if unlimited.
    `untraced` are the indices of the blocks that images go through, whose activations aren't known. `eager_only`:
    transformers has only eager attention for the model. `language` counts the parameters of the part that text goes
    through, 0 if that is the whole model. `division`: what a mesh divides.
    """

    name: str
    model_type: str
    hidden: int
    vocab: int
    heads: int
    head_dim: int
    blocks: tuple[Block, ...]
    outer: tuple[Parameter, ...]
    tied: bool
    buffers_bytes: int = 0
    stored_buffers: int = 0
    experts: int = 0
    experts_used: float = 0
    window: int = 0
    positions: int = 0
    untraced: tuple[int, ...] = ()
    eager_only: bool = False
    language: int = 0
    division: Divisible = UNKNOWN_DIVISION

    def __hash__(self) -> int:
        """The hash of a part: shapes have hundreds of parameters, and are keys of caches."""
        return hash((self.name, self.hidden, self.vocab))

    @property
    def depth(self) -> int:
        return sum(len(block.layers) for block in self.blocks)

    @property
    def numel(self) -> int:
        in_blocks = sum(len(block.layers) * parameter.numel for block in self.blocks for parameter in block.parameters)
        return in_blocks + sum(parameter.numel for parameter in self.outer)

    @lru_cache(256)  # noqa: B019 - shapes live as long as the process
    def part(self, tensor: int, experts: int) -> "ModelShape":
        """One rank's part of the model: its part of each parameter, its heads, and its tokens' share of the experts."""
        if tensor == experts == 1:
            return self
        return replace(
            self,
            heads=-(-self.heads // tensor) if self.division.heads else self.heads,
            blocks=tuple(
                replace(block, parameters=tuple(p.part(tensor, experts) for p in block.parameters))
                for block in self.blocks
            ),
            outer=tuple(p.part(tensor, experts) for p in self.outer),
            experts=-(-self.experts // experts),
            experts_used=self.experts_used / (tensor if experts > 1 else 1),
        )

    def attention_widths(self, block: Block) -> tuple[int, float]:
        """The number of a token's queries, and of its keys, in a layer; 0 keys without attention."""
        attention = sum(weight.inner_width(self.hidden) for weight in block.products if weight.is_attention)
        queries = self.heads * self.head_dim
        return queries, max(0, attention - 2 * queries) / 2
