"""Gives a block on the meta device the adapters and 4-bit weights of a variant."""

from collections.abc import Collection
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners import lora
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from accel_fsdp.errors import UserError
from accel_fsdp.job import ATTENTION_LINEAR
from accel_fsdp.prediction.memory import Variant

QUANT_BLOCK = 64
"""Weights that share one scale in bitsandbytes' nf4."""
_NAME = "default"


def adapt(layer: nn.Module, variant: Variant, rank: int, frozen: Collection[str] = ()) -> None:
    """Wraps the variant's linear layers in PEFT's LoRA layers; with QLoRA all of them are packed into 4 bits.

    Experts whose weights are one 3-D tensor are not linear layers: `train/sft.py` and bitsandbytes skip them. `frozen`
    are names of linear layers that get no adapter.
    """
    dtype = torch.bfloat16 if variant.adapters == "bf16" else torch.float32
    for path, module in list(layer.named_modules()):
        if isinstance(module, nn.Linear | Conv1D):
            parent, _, attribute = path.rpartition(".")
            adapted = attribute not in frozen if variant.targets == "all" else attribute in ATTENTION_LINEAR
            if adapted or variant.method == "qlora":
                _check_product(path, module)
            if adapted:
                layer.get_submodule(parent)._modules[attribute] = _lora_layer(module, variant, rank)
            elif variant.method == "qlora":
                layer.get_submodule(parent)._modules[attribute] = FourBitLinear(module)
    layer.requires_grad_(False)
    for module in layer.modules():
        if isinstance(module, LoraLayer):
            for adapters in (module.lora_A, module.lora_B):
                adapters.to(dtype).requires_grad_(True)


def _check_product(path: str, module: Any) -> None:
    """Refuses linear layers with an overridden forward that returns more than a product, such as Llama 4's router."""
    if type(module).forward in (nn.Linear.forward, Conv1D.forward):
        return
    returned = module(module.weight.new_empty(1, module.in_features))
    if not isinstance(returned, Tensor):
        raise UserError(
            f"{type(module).__name__} ({path}) can't get an adapter or 4-bit weights: it returns "
            f"{len(returned)} tensors",
            why="PEFT and bitsandbytes take it for a plain linear layer, and training would stop at the first step",
            fix="--method full",
        )


def _lora_layer(module: Any, variant: Variant, rank: int) -> nn.Module:
    is_packed = variant.method == "qlora"
    config = LoraConfig(
        **{"r": rank, "lora_alpha": rank, "lora_dropout": 0.1 if variant.dropout else 0.0},  # its size does not matter
        fan_in_fan_out=not is_packed and not isinstance(module, nn.Linear),
    )
    base, kind = (FourBitLinear(module), lora.Linear4bit) if is_packed else (module, lora.Linear)
    wrapped: nn.Module = kind(base, _NAME, config=config, r=rank, lora_alpha=rank)
    return wrapped


class _FourBit(torch.autograd.Function):
    """bitsandbytes' `MatMul4Bit` for 1537 tokens or more (for fewer, a kernel unpacks nothing in forward)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, int], bias: Tensor | None) -> Tensor:
        """A linear layer whose weight exists only during the call; autograd saves neither weight nor input."""
        ctx.shape = shape
        return F.linear(x, unpacked(shape, x), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """The input's gradient, with the weight unpacked again."""
        return torch.matmul(grads[0], unpacked(ctx.shape, grads[0])), None, None


def unpacked(shape: tuple[int, int], like: Tensor) -> Tensor:
    """A 4-bit weight in 16 bits; its float32 scales exist while it is made (bitsandbytes, `dequantize_4bit`)."""
    scales = like.new_empty(shape[0] * shape[1] // QUANT_BLOCK, dtype=torch.float32)
    weight = like.new_empty(shape)
    del scales
    return weight


class FourBitLinear(nn.Linear):
    """Allocates like bitsandbytes' `Linear4bit` with bf16 compute, but without packed weights."""

    def __init__(self, like: nn.Linear | Conv1D) -> None:
        transposed = isinstance(like, Conv1D)  # transformers makes them linear when it quantises
        inputs, outputs = like.weight.shape if transposed else reversed(like.weight.shape)
        super().__init__(inputs, outputs, bias=False, device=like.weight.device)
        self.bias = like.bias

    def forward(self, input: Tensor) -> Tensor:
        """Casts to the compute dtype and back, as `Linear4bit.forward` does."""
        dtype = input.dtype
        bias = None if self.bias is None else self.bias.to(torch.bfloat16)
        out: Tensor = _FourBit.apply(input.to(torch.bfloat16), (self.out_features, self.in_features), bias)  # type: ignore[no-untyped-call]
        return out.to(dtype)
