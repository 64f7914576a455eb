"""Finds a script's hooks on modules and weights, and hooks on weights that FSDP never calls."""

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accel_fsdp.library_internals import Internal
from accel_fsdp.ranks import events, script
from accel_fsdp.ranks.observing import Observation, replace
from accel_fsdp.ranks.weights import is_sharded

if TYPE_CHECKING:
    from torch import nn

OF_TRANSFORMERS = ("transformers.", "accel_fsdp.training.")
"""Modules whose hooks on weights keep the ranks of a mesh equal to one process."""
HOOKS = Observation("hooks on weights", Internal("torch:Tensor.register_hook", "self hook"))


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


@dataclass
class _Hook:
    """A hook that the script has registered on a weight of this shape."""

    function: Callable[[Any], Any]
    shape: tuple[int, ...]
    line: str
    calls: int = 0

    def __call__(self, gradient: Any) -> Any:
        self.calls += 1
        return self.function(gradient)

    def changes_gradients(self) -> bool:
        """Whether it changes a gradient of 1000s: a hook that only logs one may be lost."""
        import torch

        gradient = torch.full(self.shape, 1e3)
        try:
            return self.function(gradient) is not None or not bool(gradient.eq(1e3).all())
        except Exception:  # any error of the script's own code
            return False


class ObservedHooks:
    """FSDP replaces weights by shards, and calls hooks of neither but those on FSDP1's flat weights."""

    def __init__(self) -> None:
        self.hooks: list[_Hook] = []
        self.is_sharded = False

    def install(self) -> None:
        import torch

        replace(torch.Tensor, "register_hook", self._register)

    def _register(self, original: Callable[..., Any], tensor: Any, hook: Callable[[Any], Any]) -> Any:
        import torch

        if not isinstance(tensor, torch.nn.Parameter) or not script.is_calling(sys._getframe(2)):
            return original(tensor, hook)
        observed = _Hook(hook, tuple(tensor.shape), script.line_of_stack(sys._getframe(2)))
        self.hooks.append(observed)
        return original(tensor, functools.wraps(hook)(lambda gradient: observed(gradient)))

    def before_step(self, optimizer: Any) -> None:
        if self.hooks and not self.is_sharded:
            self.is_sharded = any(is_sharded(weight) for group in optimizer.param_groups for weight in group["params"])

    def report_end(self) -> None:
        """Reports hooks of which none was called; others may be on weights that the loss doesn't use."""
        if self.is_sharded and not any(hook.calls for hook in self.hooks):
            for hook in filter(_Hook.changes_gradients, self.hooks):
                events.report("lost-hook", line=hook.line)
                return
