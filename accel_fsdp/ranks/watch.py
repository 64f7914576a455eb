"""Watches a training script from inside its rank: models that are prepared, losses, steps, saves. It changes nothing.

What is replaced here calls what it replaces, first and with the same arguments, and then tells what it saw.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from accel_fsdp.ranks import events, saves, script
from accel_fsdp.ranks.holding import Holding, measure


def begin() -> None:
    """Puts the watch in place; before the script imports anything."""
    import torch
    from accelerate import Accelerator
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    _after(torch.Tensor, "backward", _tell_loss)
    _after(Accelerator, "prepare", _tell_prepared)
    _FirstStep().install(register_optimizer_step_pre_hook)


def _after(owner: Any, name: str, then: Callable[..., None]) -> None:
    """Calls `then(result, *args)` after each outermost call of a method."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def watched(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        then(result, *args)
        return result

    setattr(owner, name, watched)


def _tell_loss(_: None, loss: Any, *__: Any) -> None:
    if loss.numel() == 1:
        events.tell("loss", value=float(loss.detach()))


def _tell_prepared(result: Any, *_: Any) -> None:
    import torch

    for one in result if isinstance(result, tuple | list) else (result,):
        if isinstance(one, torch.nn.Module):
            tell_holding("prepared", measure(one))


def tell_holding(kind: str, holding: Holding, **more: Any) -> None:
    """An event with what this rank holds."""
    events.tell(kind, holding=dataclasses.asdict(holding), **more)


class _FirstStep:
    """Measures what the first step of an optimizer trains: the outermost modules that ran forward before it."""

    def __init__(self) -> None:
        self.depth = 0
        self.models: dict[int, Any] = {}
        self.saves = saves.Saves()

    def install(self, on_step: Callable[..., Any]) -> None:
        from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

        self.handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
            on_step(self._step),
        ]

    def _enter(self, module: Any, *_: Any) -> None:
        if self.depth == 0:
            self.saves.watch()
            self.models[id(module)] = module
        self.depth += 1

    def _leave(self, *_: Any) -> None:
        self.depth -= 1

    def _step(self, optimizer: Any, *_: Any) -> None:
        for handle in self.handles:
            handle.remove()
        trained = {id(one) for group in optimizer.param_groups for one in group["params"]}
        for model in self.models.values():
            own = {id(one) for one in model.parameters() if one.requires_grad}
            if own:
                tell_holding("stepped", measure(model), missing=len(own - trained), strange=len(trained - own))
        self.models.clear()


def tell_failure(error: BaseException) -> None:
    """An event with what ended the script, and the innermost line of it that was running."""
    events.tell("failed", error=f"{type(error).__name__}: {error}", line=script.line_of_error(error))
