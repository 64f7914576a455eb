"""Watches a training script from inside its rank: models that are prepared, batches, losses, steps, saves.

It changes nothing. What is replaced here calls what it replaces with the same arguments, and then tells what it saw.
"""

import dataclasses
import functools
import os
import signal
import sys
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from accel_fsdp.library_internals import Internal
from accel_fsdp.models import counting
from accel_fsdp.ranks import events, script
from accel_fsdp.ranks.holding import is_unit, measure, unwrapped, user_name
from accel_fsdp.ranks.saves import Saves

if TYPE_CHECKING:
    import torch
    from torch import nn

RELIES_ON = (Internal("accelerate:Accelerator.prepare"),)
HOLD_BEFORE = "ACCEL_FSDP_HOLD_BEFORE"
"""The variable that names a step before which the rank waits, to be killed there."""


def begin() -> None:
    """Puts the watch in place; before the script imports anything."""
    import torch
    import torch.utils.checkpoint

    _after(torch.Tensor, "backward", _tell_loss)
    _after(torch.nn.utils, "clip_grad_norm_", _tell_clipping)
    _after(torch.utils.checkpoint, "checkpoint", _tell_checkpoint)
    _watch_prepare()
    _Steps(int(os.environ.get(HOLD_BEFORE, "0"))).install()


def tell_failure(error: BaseException) -> None:
    """An event with what ended the script, and the innermost line of it that was running."""
    events.tell("failed", error=f"{type(error).__name__}: {error}", line=script.line_of_error(error))


def _after(owner: Any, name: str, then: Callable[..., None]) -> None:
    """Calls `then` with the same arguments after each call of a function."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def watched(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        then(*args, **kwargs)
        return result

    setattr(owner, name, watched)


def _tell_loss(loss: "torch.Tensor", *_: Any, **__: Any) -> None:
    if loss.numel() == 1:
        events.tell("loss", value=float(loss.detach()))


def _tell_clipping(parameters: Any, *_: Any, **__: Any) -> None:
    """By torch's own function, called in the script itself: it knows nothing of FSDP1's shards."""
    if script.is_calling(sys._getframe(2)):
        events.tell("clipped", line=script.line_of_stack(sys._getframe(2)))


def _tell_checkpoint(*_: Any, preserve_rng_state: bool = True, **__: Any) -> None:
    if not preserve_rng_state:
        events.tell("forgot-rng", line=script.line_of_stack(sys._getframe(2)))


def _watch_prepare() -> None:
    """Measures each model that Accelerate prepares, and counts its weights before."""
    from accelerate import Accelerator

    original = Accelerator.prepare

    @functools.wraps(original)
    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        before = [sum(counting.weights(one).values()) for one in args if isinstance(one, torch.nn.Module)]
        result = original(self, *args, **kwargs)
        made = result if isinstance(result, tuple | list) else (result,)
        models = [one for one in made if isinstance(one, torch.nn.Module)]
        for model, weights in zip(models, before, strict=False):
            _tell_holding("prepared", model, before=weights)
        return result

    Accelerator.prepare = prepare


def _tell_holding(kind: str, model: "nn.Module", **more: Any) -> None:
    events.tell(kind, holding=dataclasses.asdict(measure(model)), **more)


class _Steps:
    """What the first step of an optimizer trains: the outermost modules that ran forward before it, and their rows."""

    def __init__(self, hold_before: int) -> None:
        """`hold_before`: the step, counted from 1, before which this rank waits for good; 0 for none."""
        self.hold_before = hold_before
        self.taken = 0
        self.depth = 0
        self.models: dict[int, Any] = {}
        self.rows: list[int] = []
        self.units: list[int] = []
        self.awaits_rows = False
        self.saves = Saves()

    def install(self) -> None:
        """Puts its hooks in place."""
        from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self.of_modules: list[Any] = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        register_optimizer_step_pre_hook(self._step)

    def _enter(self, module: "nn.Module", args: tuple[Any, ...]) -> None:
        import torch

        if self.depth == 0:
            self.saves.watch()
            self.models[id(module)] = module
            self.awaits_rows = torch.is_grad_enabled()
        if is_unit(module):
            self.units.append(id(module))
        self.depth += 1
        if self.awaits_rows and args and isinstance(args[0], torch.Tensor):  # Transformers: what its embedding is given
            self.awaits_rows = False
            self.rows.append(zlib.crc32(args[0].detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()))

    def _leave(self, *_: Any) -> None:
        self.depth -= 1

    def _step(self, optimizer: Any, *_: Any) -> None:
        self.taken += 1
        if self.taken == 1:
            self._tell_first(optimizer)
        if self.taken == self.hold_before:
            events.tell("held")
            signal.pause()

    def _tell_first(self, optimizer: Any) -> None:
        for hook in self.of_modules:
            hook.remove()
        trained = {id(one) for group in optimizer.param_groups for one in group["params"]}
        for model, own in self._trained_by(trained):
            name = type(unwrapped(model)).__name__
            events.tell("optimizer", model=name, missing=len(own - trained), strange=len(trained - own))
            _tell_holding("stepped", model)
            names = {id(module): user_name(path) for path, module in model.named_modules()}
            events.tell("units", names=[names[unit] for unit in self.units if unit in names])
        events.tell("rows", hashes=self.rows)
        self.models.clear()

    def _trained_by(self, trained: set[int]) -> list[tuple["nn.Module", set[int]]]:
        """The outermost modules of which an optimizer has parameters; all that can be trained, if it has of none.

        A reference model of DPO has gradients and no optimizer.
        """
        inner = {id(one) for model in self.models.values() for one in model.modules() if one is not model}
        outer = [model for number, model in self.models.items() if number not in inner]  # others ran again
        able = [(model, {id(one) for one in model.parameters() if one.requires_grad}) for model in outer]
        able = [(model, own) for model, own in able if own]
        return [(model, own) for model, own in able if own & trained] or able
