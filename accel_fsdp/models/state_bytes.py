"""How many bytes a model's parameters take while they are trained, gathered and stored. Pure.

For a model of which no more than the number of parameters is known, or the sum of their bytes. The planner counts
padding and shards to the byte, from the same parts (`prediction.memory.shards`). Sources: torch.optim.AdamW keeps two
moments in the dtype of the weight; FSDP with mixed precision keeps float32 masters (accelerate >= 1.13,
`prepare_model`), DeepSpeed's optimizers always do (`stage_1_and_2.py`, `stage3.py`, `fp32_groups`).
"""

from collections.abc import Mapping

from accel_fsdp.config import Method

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MASTER = DTYPE_BYTES["float32"]
LOW = DTYPE_BYTES["bfloat16"]
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
"""A 4-bit weight with its share of absmax in 8 bits per block of 64, and theirs in float32 per 256 blocks (QLoRA)."""
MOMENTS = 2
"""Adam's states per parameter."""
HEADROOM = 1.1
"""Of host memory over a gathered model: the tensor that is on its way, and what else the process needs meanwhile."""


def weight_bytes(loaded: int, mixed: bool, fsdp: bool, zero: bool) -> int:
    """Bytes of a trained weight at rest, of one that was loaded with `loaded` bytes."""
    return MASTER if zero or (fsdp and mixed) else loaded


def training_bytes(weights: int) -> int:
    """Weights, gradients and Adam's moments, all in the dtype of the weights."""
    return weights * (1 + 1 + MOMENTS)


def checkpoint_bytes(weights: int, trained: int, copies: int = 0, moments: int = MOMENTS) -> int:
    """A checkpoint of all weights, of the moments of those that are trained, and of `copies` of weights in bytes.

    FSDP's gathered ones have a copy of all weights: one is for the engine, one for Hugging Face. Of DeepSpeed's,
    `weights` are the masters, and `zero_copies` says the rest.
    """
    return weights + copies + trained * moments


def zero_copies(weights: int, stage: int) -> int:
    """What a checkpoint under DeepSpeed has beside masters and moments, of `weights` in the dtype of forward.

    Trainer gathers them for Hugging Face. The engine stores its module too, which stage 3 has none of that is whole.
    Adam's checkpoints in bf16 thus take 16 bytes per parameter, and 14 in stage 3 (measured, DeepSpeed 0.19).
    """
    return weights * (1 if stage == 3 else 2)


def gathering_bytes(weights: int) -> float:
    """The host memory that gathering all weights on one rank takes."""
    return weights * HEADROOM


PER_PARAMETER: Mapping[Method, float] = {"full": training_bytes(MASTER), "lora": LOW, "qlora": 0.6}
"""About, before activations: with an adapter a frozen weight of 16 bits, or one of 4 bits with its share of those that
stay in 16."""
