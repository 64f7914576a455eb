"""Reproduces the memory of fused kernels: stand-ins save and overwrite the same tensors as the published kernels.

Read in the sources of Liger (`ops/rms_norm.py`, `rope.py`, `swiglu.py`) and of unsloth's kernels, which
fms-acceleration's foak plugin brings to FSDP. Both: a norm saves its input and a float32 per row, and overwrites the
incoming gradient; rotary embedding is in place. Liger: the gated product saves its factors and overwrites them with
their gradients. foak: LoRA on 4-bit attention saves its input, and a copy after dropout per adapter, but neither masks
nor products.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.nn import functional as F

from accel_fsdp.prediction.memory import Variant
from accel_fsdp.prediction.tracing.lora_layers import unpacked

ROTARY = "apply_rotary_pos_emb"
"""The name of transformers' function for rotary embedding."""
GATED = ("gate_proj", "up_proj", "down_proj")
APART = ("Gemma2", "Gemma3")  # Liger's norm of these makes a separate gradient (monkey_patch.py, in_place=False)


def fuse(model: nn.Module, variant: Variant) -> None:
    """Replaces layers by stand-ins for a variant's fused kernels."""
    for path, module in list(model.named_modules()):
        parent, _, attribute = path.rpartition(".")
        new = _fused_module(module, variant)
        if new is not None and path:
            model.get_submodule(parent)._modules[attribute] = new
    if variant.kernels == "foak" and variant.method == "qlora":
        for module in list(model.modules()):
            _fuse_adapters(module, variant)


def _fused_module(module: nn.Module, variant: Variant) -> nn.Module | None:
    name = type(module).__name__
    if name.endswith("RMSNorm") and "weight" in module._parameters:
        return FusedNorm(module, in_place=not name.startswith(APART))
    if variant.kernels == "liger" and set(GATED) <= module._modules.keys():
        return FusedGate(module)
    return None


@contextmanager
def rotary_in_place(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Replaces rotary embedding by its stand-in in the Python modules of the layers' attention."""
    names = {type(module).__module__ for layer in layers for module in layer.modules()}
    with ExitStack() as stack:
        for place in (sys.modules[name] for name in names if ROTARY in vars(sys.modules[name])):
            stack.enter_context(patch.object(place, ROTARY, _rotated))
        yield


class FusedNorm(nn.Module):
    def __init__(self, like: nn.Module, in_place: bool) -> None:
        super().__init__()
        self.weight = like._parameters["weight"]
        self._in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        """The normalised input, in its dtype."""
        return _Norm.apply(x, self.weight, self._in_place)  # type: ignore[no-untyped-call, no-any-return]


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, in_place: bool) -> Tensor:
        ctx.in_place = in_place
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        _, weight, _ = ctx.saved_tensors
        weight_grad = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        return grads[0] if ctx.in_place else torch.empty_like(grads[0]), weight_grad, None


def _rotated(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    return _Rotary.apply(q), _Rotary.apply(k)  # type: ignore[no-untyped-call]


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """The kernel needs the heads of one token side by side, as the projection made them."""
        return grads[0].transpose(1, 2).contiguous().transpose(1, 2)


class FusedGate(nn.Module):
    """A gated feed-forward block whose activation and product are one kernel."""

    def __init__(self, like: nn.Module) -> None:
        super().__init__()
        self._modules.update(like._modules)

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = (self.get_submodule(name) for name in GATED)
        out: Tensor = down(_Product.apply(gate(x), up(x)))  # type: ignore[no-untyped-call]
        return out


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(ctx.saved_tensors)


def _fuse_adapters(attention: nn.Module, variant: Variant) -> None:
    """Merges the adapted query, key and value projections into one operation; the output's is another."""
    for names in (("q_proj", "k_proj", "v_proj"), ("o_proj",)):
        layers = [attention._modules.get(name) for name in names]
        if all(isinstance(layer, LoraLayer) for layer in layers):
            shared_layers = _SharedInputLayers([layer for layer in layers if layer is not None], variant.dropout)
            for index, name in enumerate(names):
                attention._modules[name] = _Part(shared_layers, index)


class _SharedInputLayers(nn.Module):
    """Adapted 4-bit layers that share one input."""

    def __init__(self, layers: list[nn.Module], dropout: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._dropout = dropout
        self._outputs: list[Tensor | None] = []

    def forward(self, x: Tensor, index: int) -> Tensor:
        """The output of the layer at `index`; the call for index 0 computes all outputs."""
        if index == 0:
            layers: list[Any] = list(self.layers)
            adapters = [part["default"].weight for layer in layers for part in (layer.lora_A, layer.lora_B)]
            shapes = [(layer.out_features, layer.in_features) for layer in layers]
            self._outputs = list(_Lora.apply(x, shapes, self._dropout, *adapters))  # type: ignore[no-untyped-call]
        out, self._outputs[index] = self._outputs[index], None
        assert out is not None
        return out


class _Part(nn.Module):
    def __init__(self, together: _SharedInputLayers, index: int) -> None:
        super().__init__()
        self._together = [together]  # in a list, so that only the first part registers the parameters
        self._place = index
        if index == 0:
            self.own = together

    def forward(self, x: Tensor) -> Tensor:
        return self._together[0](x, self._place)  # type: ignore[no-any-return]


class _Lora(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shapes: list[tuple[int, int]], dropout: bool, *adapters: Tensor) -> Any:
        x = x.to(torch.bfloat16)
        outs, inputs = [], []
        for shape, a, b in zip(shapes, adapters[::2], adapters[1::2], strict=True):
            out = F.linear(x, unpacked(shape, x))
            inputs.append(torch.native_dropout(x, 0.1, True)[0] if dropout else x)
            out += F.linear(F.linear(inputs[-1], a.to(x.dtype)), b.to(x.dtype))
            outs.append(out)
        ctx.shapes = shapes
        ctx.save_for_backward(x, *inputs, *adapters)
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        count = len(grads)
        x, inputs, adapters = ctx.saved_tensors[0], ctx.saved_tensors[1 : 1 + count], ctx.saved_tensors[1 + count :]
        adapter_grads = [torch.empty_like(adapter) for adapter in adapters]
        input_grad = x if count > 1 else torch.empty_like(x)  # three gradients are summed in the input's own memory
        for grad, shape, dropped in zip(grads, ctx.shapes, inputs, strict=True):
            input_grad += torch.matmul(grad, unpacked(shape, grad))
            input_grad += (dropped != 0) * torch.empty_like(x)
        return input_grad, None, None, *adapter_grads
