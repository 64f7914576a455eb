"""The names that an Accelerate YAML and its users give to methods, engines, strategies and dtypes."""

from typing import Literal

Method = Literal["full", "lora", "qlora"]
EngineName = Literal["fsdp", "ddp", "deepspeed", "tpu"]
WrapPolicy = Literal["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"]
StateDictType = Literal["SHARDED_STATE_DICT", "FULL_STATE_DICT"]
Precision = Literal["bf16", "fp16", "no"]
STRATEGIES: dict[int, str] = {
    1: "FULL_SHARD",
    2: "SHARD_GRAD_OP",
    3: "NO_SHARD",
    4: "HYBRID_SHARD",
    5: "HYBRID_SHARD_ZERO2",
}
"""Accelerate's numbers and names (`FSDP_SHARDING_STRATEGY` in accelerate.utils.constants, 1-based)."""
STATE_DICT_TYPES = {"1": "FULL_STATE_DICT", "2": "LOCAL_STATE_DICT", "3": "SHARDED_STATE_DICT"}
"""torch's numbers (`torch.distributed.fsdp.StateDictType`), which Accelerate takes in place of the names."""
RESHARDS = {"FULL_SHARD": True, "HYBRID_SHARD": True, "SHARD_GRAD_OP": False, "HYBRID_SHARD_ZERO2": False}
"""FSDP1's strategies as FSDP2's `fsdp_reshard_after_forward`; FSDP2 has no NO_SHARD, which is plain DDP."""
TORCH_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "no": "float32"}
"""Accelerate's `mixed_precision` as torch names the dtype."""
LOW_DTYPES = ("bfloat16", "float16")
