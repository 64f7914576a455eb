"""The optimizers: Trainer's names, the state that each keeps, and how often a step accesses the memory. Pure.

`state_bytes` in this package has the other bytes of training. Combinations that fail are in `job/combinations.py`.
"""

import math
from collections.abc import Sequence
from typing import Literal, get_args

from accel_fsdp.models.state_bytes import MASTER, MOMENTS

OptimizerName = Literal["adamw_torch_fused", "adamw_torch", "adamw_8bit", "adafactor", "sgd"]
"""Optimizers whose time and memory are predicted."""
BY_TRAINERS_NAME: dict[str, OptimizerName] = {
    **{name: name for name in get_args(OptimizerName)},
    "adamw_bnb_8bit": "adamw_8bit",
    "paged_adamw_8bit": "adamw_8bit",
}
ACCESSES: dict[OptimizerName, float] = {
    "adamw_torch_fused": 7,
    "adamw_torch": 20,
    "adamw_8bit": 4,
    "adafactor": 6,
    "sgd": 3,
}
"""How often one optimizer step reads or writes each trained element: fused Adam reads p, g, m, v and writes p, m, v."""
MOMENTS_OF = {"sgd": 0, "adafactor": 0, "lion": 1, "rmsprop": 1, "adagrad": 1, "ademamix": 3}
"""The moments of Trainer's other optimizers, by the first word of the name; unlisted ones count as Adam."""
MOMENT_BYTES = {"4bit": 0.5, "8bit": 1, "32bit": MASTER, "bnb": MASTER, "ademamix": MASTER}
"""Bytes of a moment by the last word of the optimizer's name; those of a weight for unlisted ones."""
EIGHT_BIT_FROM = 4096
"""Elements of a tensor: bitsandbytes keeps the state of smaller ones in float32 (`min_8bit_size`)."""


def element_bytes(optimizer: str, weight: int) -> float:
    """An optimizer's state per trained parameter of `weight` bytes; close to 0 for Adafactor's matrices."""
    family, kind = optimizer.removeprefix("paged_").partition("_")[0], optimizer.rpartition("_")[2]
    return MOMENTS_OF.get(family, MOMENTS) * MOMENT_BYTES.get(kind, weight)


def tensor_bytes(optimizer: str, shape: Sequence[int], weight: int, embedding: bool = False) -> int:
    """An optimizer's state of one trained tensor, an element of which takes `weight` bytes.

    With 8-bit moments, those of a small tensor are float32, and with bitsandbytes, but not torchao, Trainer also keeps
    those of an `embedding` in float32 (`create_optimizer`). Adafactor has a float32 mean of each row and of each
    column, and a full second moment of a vector.
    """
    numel = math.prod(shape)
    if optimizer == "adafactor":
        is_matrix = len(shape) > 1
        return MASTER * (math.prod(shape[:-1]) + math.prod([*shape[:-2], shape[-1]]) if is_matrix else numel)
    in_float32 = numel < EIGHT_BIT_FROM or (embedding and not optimizer.startswith("adamw_torch"))
    return round(numel * element_bytes(optimizer.replace("_8bit", "_32bit") if in_float32 else optimizer, weight))
