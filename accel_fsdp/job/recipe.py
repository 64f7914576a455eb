"""How one rank trains: everything besides model and machine that decides memory and time."""

from dataclasses import dataclass, replace
from typing import Literal

from accel_fsdp.config import Method, Precision
from accel_fsdp.models import optimizers

Checkpointing = Literal["none", "full", "reentrant", "selective"]
LoraTargets = Literal["all", "attention"]
Attention = Literal["sdpa", "eager", "flash"]
Kernels = Literal["none", "liger", "foak"]
ATTENTION_LINEAR = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "query_key_value", "c_attn", "Wqkv"})
"""Names of attention's linear layers in common models."""


@dataclass(frozen=True)
class Recipe:
    """How one rank trains: everything besides model and machine that decides memory and time.

    `rows` is the micro-batch of one rank and `length` its sequence length. `precision` is the mixed precision, `dtype`
    that of the loaded weights: float32 masters with bf16 compute are ("bf16", "float32"), pure bf16 is ("no",
    "bfloat16"). `checkpointing` "reentrant" is torch's older implementation, "selective" keeps attention's output and
    every second product, as torchtitan does. `chunked_loss` never holds all logits at once.

    `attention` "flash" is flash_attention_2. `kernels` are the fused ones of Trainer's `use_liger_kernel`, or of the
    "fused ops and kernels" plugin of fms-acceleration, foak. `eval_batch` is one rank's number of rows in an
    evaluation, 0 without one. Rows that are `varied` have many lengths, at most `length`, and batches are padded to
    their longest row.
    """

    method: Method = "full"
    precision: Precision = "bf16"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    rows: int = 1
    length: int = 2048
    accumulation: int = 1
    optimizer: optimizers.OptimizerName = "adamw_torch_fused"
    checkpointing: Checkpointing = "none"
    chunked_loss: bool = False
    lora_rank: int = 16
    lora_targets: LoraTargets = "all"
    lora_dropout: bool = False
    attention: Attention = "sdpa"
    kernels: Kernels = "none"
    eval_batch: int = 0
    varied: bool = False

    @property
    def recomputes(self) -> bool:
        """Whether backward computes whole blocks again."""
        return self.checkpointing in ("full", "reentrant")

    def part_of_rows(self, ranks: int) -> "Recipe":
        """The recipe of one of the ranks that divide each row's tokens among them."""
        return self if ranks == 1 else replace(self, length=-(-self.length // ranks))
