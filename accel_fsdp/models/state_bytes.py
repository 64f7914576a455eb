"""The bytes of a model's parameters while they are trained, gathered and stored.

Pure. For a model with a known number of parameters, or a known sum of their bytes. The planner counts padding and
shards to the byte, from the same parts (`prediction.memory.shards`). Sources: torch.optim.AdamW keeps two moments in
the dtype of the weight; FSDP with mixed precision keeps float32 masters (accelerate >= 1.13, `prepare_model`),
DeepSpeed's optimizers always do (`stage_1_and_2.py`, `stage3.py`, `fp32_groups`).
"""

from collections.abc import Mapping

from accel_fsdp.checkpoints import ITEM_BYTES, TORCH_NAMES
from accel_fsdp.config import Method
from accel_fsdp.units import about_gib

DTYPE_BYTES = {TORCH_NAMES[short]: ITEM_BYTES[short] for short in ("F32", "BF16", "F16")}
MASTER = DTYPE_BYTES["float32"]
LOW = DTYPE_BYTES["bfloat16"]
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
"""A 4-bit weight with its share of absmax in 8 bits per block of 64, and theirs in float32 per 256 blocks (QLoRA)."""
MOMENTS = 2
"""Adam's states per parameter."""
HEADROOM = 1.1
"""Host memory as a factor of a gathered model, for the tensor in transit and the process itself."""


def weight_bytes(loaded: int, mixed: bool, fsdp: bool, zero: bool) -> int:
    """Bytes of a trained weight between steps, if its checkpoint stores it in `loaded` bytes."""
    return MASTER if zero or (fsdp and mixed) else loaded


def training_bytes(weights: int) -> int:
    return weights * (1 + 1 + MOMENTS)


def checkpoint_bytes(
    weights: int, optimizer: float, *, gathered: bool = False, zero_stage: int | None = None, forward: int = 0
) -> int:
    """A training checkpoint of weights and the optimizer's state, in bytes of each.

    FSDP's gathered checkpoints have the weights twice: once for the engine, once for Hugging Face. In DeepSpeed's,
    `weights` are the masters, and the weights in the dtype of forward take `forward` bytes: Trainer gathers them for
    Hugging Face, and the engine also stores its module, except in stage 3, which has no whole one. Adam's checkpoints
    in bf16 thus take 16 bytes per parameter, and 14 in stage 3 (measured, DeepSpeed 0.19).
    """
    copies = weights if gathered else 0
    if zero_stage is not None:
        copies = forward * (1 if zero_stage == 3 else 2)
    return weights + copies + round(optimizer)


def gathering_bytes(weights: int) -> float:
    return weights * HEADROOM


PER_PARAMETER: Mapping[Method, float] = {"full": training_bytes(MASTER), "lora": LOW, "qlora": 0.6}
"""Approximate bytes, before activations: with an adapter a frozen weight of 16 bits, or one of 4 bits with its share of
those that stay in 16."""


def experts_in_16_bits(parameters: float) -> str:
    """A sentence on the 16-bit experts of a mixture, which bitsandbytes can't quantise when they are fused."""
    size = about_gib(parameters * DTYPE_BYTES["bfloat16"])
    return f"bitsandbytes quantises only linear layers, so the experts, {size}, stay in 16 bits"
