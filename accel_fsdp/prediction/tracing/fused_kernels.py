"""Reproduces the memory of Liger's fused kernels: stand-ins save and overwrite the same tensors.

Read in the sources of Liger (`ops/rms_norm.py`, `rope.py`, `swiglu.py`): a norm saves its input and a float32 per row,
and overwrites the incoming gradient; rotary embedding is in place; the gated product saves its factors and overwrites
them with their gradients.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

ROTARY = "apply_rotary_pos_emb"
"""The name of transformers' function for rotary embedding."""
GATED = ("gate_proj", "up_proj", "down_proj")
APART = ("Gemma2", "Gemma3")  # Liger's norm of these makes a separate gradient (monkey_patch.py, in_place=False)


def fuse(model: nn.Module) -> None:
    """Replaces layers by stand-ins for fused kernels."""
    for path, module in list(model.named_modules()):
        parent, _, attribute = path.rpartition(".")
        new = _fused_module(module)
        if new is not None and path:
            model.get_submodule(parent)._modules[attribute] = new


def _fused_module(module: nn.Module) -> nn.Module | None:
    name = type(module).__name__
    if name.endswith("RMSNorm") and "weight" in module._parameters:
        return FusedNorm(module, in_place=not name.startswith(APART))
    if set(GATED) <= module._modules.keys():
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
