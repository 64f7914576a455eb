"""The precision in which a model computes, and in which FSDP keeps what it gathers and reduces."""

import sys
from typing import TYPE_CHECKING, Any

from accel_fsdp.config import LONG_DTYPES, TORCH_DTYPES
from accel_fsdp.ranks.holding import groups, is_unit

if TYPE_CHECKING:
    import torch
    from torch import nn

REDUCING_HOOKS = {"allreduce_hook": "no", "fp16_compress_hook": "fp16", "bf16_compress_hook": "bf16"}
"""The dtypes in which torch's hooks of DDP reduce gradients to their mean."""


def of(model: Any) -> str:
    """The precision of the forward pass, by Accelerate's name; "no" for the weights' own dtype."""
    import torch

    if torch.is_autocast_enabled("cpu"):
        return _name(torch.get_autocast_dtype("cpu"))
    if (state := sys.modules.get("accelerate.state")) and state.is_initialized():
        return str(state.AcceleratorState().mixed_precision)
    return cast(model)


def cast(model: "nn.Module") -> str:
    """The dtype to which FSDP casts the weights for a forward pass; "no" if it casts none."""
    return _name(getattr(_policy(model), "param_dtype", None))


def reduces(model: "nn.Module") -> str:
    """The dtype in which FSDP, or a hook of DDP, reduces gradients, if it has 16 bits."""
    by_hook = [REDUCING_HOOKS[name] for name in _hooks(model) if name in REDUCING_HOOKS]
    return next(iter(by_hook), _name(getattr(_policy(model), "reduce_dtype", None)))


def other_reduction(model: "nn.Module") -> str:
    """The name of a hook by which DDP reduces gradients to something else than their mean; empty without one."""
    return next((name for name in _hooks(model) if name not in REDUCING_HOOKS), "")


def divisor(model: "nn.Module") -> float:
    """The number by which FSDP2 divides the sum over ranks, where a script has set one; else 0."""
    from torch.distributed.fsdp import FSDPModule

    units = [unit for unit in model.modules() if isinstance(unit, FSDPModule)]
    factors = [group.gradient_divide_factor for unit in units for group in groups(unit._get_fsdp_state())]
    return next((float(factor) for factor in factors if factor), 0.0)


def is_unsynced(model: Any) -> bool:
    """Whether a backward pass now keeps gradients on each rank, as in no_sync."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    if isinstance(model, DistributedDataParallel):
        return not model.require_backward_grad_sync
    units: list[Any] = list(filter(is_unit, model.modules()))
    if any(isinstance(unit, FullyShardedDataParallel) and not unit._sync_gradients for unit in units):
        return True
    fsdp2 = (unit for unit in units if isinstance(unit, FSDPModule))
    return any(not group.reduce_grads for unit in fsdp2 for group in groups(unit._get_fsdp_state()))


def _hooks(model: Any) -> list[str]:
    """The names of torch's own hooks; what a script's own ones do is compared."""
    hooks = [hook for hook, _ in getattr(model, "_comm_hooks", ())]
    return [hook.__name__ for hook in hooks if getattr(hook, "__module__", "").startswith("torch.")]


def _policy(model: "nn.Module") -> Any:
    """FSDP's mixed precision; None without it."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    unit: Any = next((module for module in model.modules() if is_unit(module)), None)
    if unit is None or isinstance(unit, FullyShardedDataParallel):
        return getattr(unit, "mixed_precision", None)
    return unit._get_fsdp_state()._mp_policy


def _name(dtype: Any) -> str:
    return next((name for name, torchs in TORCH_DTYPES.items() if str(dtype) == f"torch.{torchs}"), "no")


def rounded(weight: "torch.Tensor", cast: str) -> "torch.Tensor":
    """The weight as FSDP casts it: norms that take the same steps are all rounded in the same direction."""
    import torch

    return weight.to(getattr(torch, LONG_DTYPES[cast])).to(weight.dtype) if cast in LONG_DTYPES else weight
