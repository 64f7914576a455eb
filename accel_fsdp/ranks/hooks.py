"""Finds a script's hooks on modules and weights."""

import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

OF_TRANSFORMERS = ("transformers.", "accel_fsdp.training.")
"""Modules whose hooks on weights keep the ranks of a mesh equal to one process."""


def hooks_of(model: "nn.Module") -> int:
    """The number of hooks on a model's modules that may change what it computes, without those of libraries.

    Transformers' keep hidden states, and are added in a forward pass that is asked for them.
    """
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooks = [hook for module in model.modules() for kind in kinds for hook in getattr(module, kind).values()]
    functions = [inspect.unwrap(getattr(hook, "func", hook)) for hook in hooks]
    libraries = ("torch.", "deepspeed.", *OF_TRANSFORMERS)
    return sum(not str(getattr(function, "__module__", "")).startswith(libraries) for function in functions)


def has_hooks(weight: Any) -> bool:
    """Whether a script's hook changes this weight's gradient; transformers' hooks average or sum it over ranks."""
    kinds = (weight._backward_hooks, getattr(weight, "_post_accumulate_grad_hooks", None))
    hooks = [hook for of_kind in kinds for hook in (of_kind or {}).values()]
    return any(not str(getattr(hook, "__module__", "")).startswith(OF_TRANSFORMERS) for hook in hooks)
