"""Watches a training script from inside its rank: prepared models, batches, losses, steps, saves.

It changes no behaviour: each replaced function calls the original with the same arguments and then reports an event.
"""

import dataclasses
import functools
import math
import os
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from accel_fsdp.checkpoints import completeness
from accel_fsdp.errors import in_a_line
from accel_fsdp.library_internals import Internal
from accel_fsdp.ranks import collectives, drawn_rows, events, hang, holding, observing, script
from accel_fsdp.ranks.drawn_rows import ObservedRows
from accel_fsdp.ranks.holding import is_unit, measure, unwrapped, user_name
from accel_fsdp.ranks.observing import Observation, after, before, guarded, replace
from accel_fsdp.ranks.saves import ObservedSaves
from accel_fsdp.ranks.steps import ObservedSteps

if TYPE_CHECKING:
    import torch
    from torch import nn


CHECKPOINTING = Observation(
    "random numbers under activation checkpointing",
    Internal("torch.utils.checkpoint:checkpoint", "function *"),
    Internal("torch.distributed.algorithms._checkpoint.checkpoint_wrapper:torch_utils_checkpoint"),
)
HOLDING = Observation("what each rank holds", *holding.RELIES_ON)
RELIES_ON = (*CHECKPOINTING.relies_on, *drawn_rows.LOADERS.relies_on)
HOLD_AFTER = "ACCEL_FSDP_HOLD_AFTER"
"""The variable that names a checkpoint: in the first step after it is complete, a rank waits to be killed."""


def begin() -> Callable[[], None]:
    """Installs the watch before the script imports anything; returns the function to call when the script has ended."""
    steps = _Steps(os.environ.get(HOLD_AFTER), HOLDING.is_possible)
    steps.watch_backward()
    _watch_prepare(steps.measures)
    steps.install()
    if CHECKPOINTING.is_possible:
        _watch_checkpointing()
    if drawn_rows.LOADERS.is_possible:
        steps.drawn.install()
    steps.records.install()
    steps.saves.install()
    return steps.report_end


def tell_failure(error: BaseException) -> None:
    """Reports the error that ended the script, and the innermost line of the script that was running."""
    events.report(
        "failed",
        error=in_a_line(error),
        line=script.line_of_error(error),
        wrapped=_attribute_of_wrapped(error),
        collective=hang.collective_of_error(error),
    )
    collectives.report()


def _attribute_of_wrapped(error: BaseException) -> str:
    """The name of an attribute that the model has and its wrapper, such as DDP, lacks; empty for other errors."""
    import torch

    if not isinstance(error, AttributeError) or not isinstance(error.obj, torch.nn.Module):
        return ""
    inner, name = unwrapped(error.obj), error.name or ""
    return name if inner is not error.obj and hasattr(inner, name) else ""


def _watch_checkpointing() -> None:
    """Reports layers that draw random numbers, and will draw different ones when they are recomputed.

    Accelerate's wrapper for FSDP2 recomputes layers like this (1.15), which affects only dropout.
    """
    import torch
    import torch.utils.checkpoint as checkpointing
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers

    original = checkpointing.checkpoint

    @functools.wraps(original)
    def checkpoint(*args: Any, preserve_rng_state: bool = True, **kwargs: Any) -> Any:
        before = None if preserve_rng_state else torch.get_rng_state()
        result = original(*args, preserve_rng_state=preserve_rng_state, **kwargs)
        if before is not None and not torch.equal(before, torch.get_rng_state()):
            caller = sys._getframe(1)
            by_wrapper = caller.f_globals.get("__name__") == wrappers.__name__
            events.report("forgot-rng", line=script.line_of_stack(caller), by_wrapper=by_wrapper)
        return result

    checkpointing.checkpoint = checkpoint
    wrappers.torch_utils_checkpoint = checkpoint  # type: ignore[attr-defined]


def _watch_prepare(measures: bool) -> None:
    """Measures each model that Accelerate prepares, and records beforehand which of its modules share a weight."""
    import torch
    from accelerate import Accelerator

    def prepare(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        before = [_shared_weights(item) for item in args if isinstance(item, torch.nn.Module)]
        result = original(self, *args, **kwargs)
        prepared = result if isinstance(result, tuple | list) else (result,)
        models = [item for item in prepared if isinstance(item, torch.nn.Module)]
        if measures:
            plugin = getattr(self.state, "fsdp_plugin", None)
            classes = getattr(plugin, "transformer_cls_names_to_wrap", None) or ()
            for model, shared in zip(models, before, strict=False):
                _classes[id(unwrapped(model))] = tuple(classes)
                guarded(_report_holding)("prepared", model, shared=shared)
        return result

    replace(Accelerator, "prepare", prepare)
    for name in ("save_state", "load_state"):
        before(Accelerator, name, functools.partial(_check_prepared, name))


def _check_prepared(call: str, accelerator: Any, *_: Any, **__: Any) -> None:
    """Reports a save or a load before anything was prepared: it silently writes or reads no weights."""
    if not (accelerator._models or accelerator._optimizers or accelerator._custom_objects):
        events.report("state-of-nothing", call=call, line=script.line_of_stack(sys._getframe(2)))


def _shared_weights(model: "nn.Module") -> list[list[str]]:
    """The names of each weight that has several, such as that of embedding and head."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


_classes: dict[int, tuple[str, ...]] = {}
"""The layer classes by which Accelerate wrapped a model, by the id of the user's module."""


def _report_holding(kind: str, model: "nn.Module", **more: Any) -> None:
    holding = dataclasses.replace(measure(model), classes=_classes.get(id(unwrapped(model)), ()))
    events.report(kind, holding=dataclasses.asdict(holding), **more)


def _only_creates_states() -> bool:
    """Whether this is torch's step with gradients of 0, which creates an optimizer's states for a save or a load."""
    frame: FrameType | None = sys._getframe(1)
    while frame and frame.f_code.co_name != "_init_optim_state":
        frame = frame.f_back
    return frame is not None


class _Steps:
    """Observes the first step: the outermost modules that ran forward before it."""

    def __init__(self, hold_after: str | None, measures: bool) -> None:
        self.measures = measures
        self.hold_after = Path(hold_after) if hold_after else None
        self.is_first = True
        self.depth = 0
        self.models: dict[int, Any] = {}
        self.called_at: dict[int, str] = {}
        self.units: list[tuple[int, str]] = []
        self.in_backward = self.backwards_begun = False
        self.stepped_in_backward: Any = None
        self.drawn = ObservedRows()
        self.records = ObservedSteps(lambda: self.drawn.epoch)
        self.saves = ObservedSaves(self.records)
        self.module_hooks: list[Any] = []

    def install(self) -> None:
        from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self.module_hooks = [
            register_module_forward_pre_hook(guarded(self._enter)),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        register_optimizer_step_pre_hook(guarded(self._before_step))

    def _enter(self, module: "nn.Module", *_: Any) -> None:
        import torch

        if observing.is_paused:
            return
        if self.depth == 0:
            self.models[id(module)] = module
            if torch.is_grad_enabled() and not self.in_backward and id(module) not in self.called_at:
                self.called_at[id(module)] = script.line_of_call(sys._getframe(), module)
        if is_unit(module):
            self.units.append((id(module), script.line_of_stack(sys._getframe())))
        self.depth += 1

    def _leave(self, *_: Any) -> None:
        self.depth -= not observing.is_paused

    def watch_backward(self) -> None:
        import torch

        before(torch.Tensor, "backward", self._before_backward)
        after(torch.Tensor, "backward", self.ran_backward)

    def _before_backward(self, *_: Any, **__: Any) -> None:
        if self.is_first and not self.backwards_begun:  # backward may hang where the ranks ran different units
            self._report_units(self._outermost())
        self.in_backward = self.backwards_begun = True
        self.records.before_backward()

    def ran_backward(self, loss: "torch.Tensor", *_: Any, **__: Any) -> None:
        self.in_backward = False
        if self.stepped_in_backward is not None:
            self._report_first(self.stepped_in_backward)
        if loss.numel() == 1:
            value = float(loss.detach())
            line = "" if math.isfinite(value) else script.line_of_stack(sys._getframe(2))
            events.report("loss", value=value, step=self.records.steps + 1, line=line)
        self.records.ran_backward(self._outermost())
        self.drawn.ran_backward()

    def report_end(self) -> None:
        """Called at the end of the script."""
        guarded(self.records.report_end)(self._outermost(), self.drawn.batches)
        guarded(self.drawn.report_end)()

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        if _only_creates_states():
            return
        if self.is_first:
            self.records.begin(self._outermost(), optimizer)
        self.records.before_step(optimizer)
        if self.is_first and self.in_backward:  # weights may be unsharded until it ends
            self.stepped_in_backward = optimizer
        elif self.is_first and self.models:  # a closure has yet to run them
            self._report_first(optimizer)
        if self.hold_after is not None and self.hold_after.is_dir() and not completeness.flaw(self.hold_after):
            events.report("held")
            signal.pause()

    def _report_first(self, optimizer: Any) -> None:
        self.is_first, self.stepped_in_backward = False, None
        for hook in self.module_hooks:
            hook.remove()
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        models = self._trained_models(trained)
        for model in models if self.measures else ():
            _report_holding("stepped", model, line=self.called_at.get(id(model), ""))
        self.models.clear()

    def _report_units(self, models: Iterable["nn.Module"]) -> None:
        """Reports the units of FSDP that ran until now, in order, with the lines that ran them."""
        names = {id(module): user_name(path) for model in models for path, module in model.named_modules()}
        units = [(names[unit], line) for unit, line in self.units if unit in names]
        events.report("units", names=[name for name, _ in units], lines=[line for _, line in units])

    def _trained_models(self, trained: set[int]) -> list["nn.Module"]:
        """The outermost modules with parameters in an optimizer; all trainable ones if there are none.

        A reference model of DPO has gradients and no optimizer.
        """
        candidates = [(model, {id(p) for p in model.parameters() if p.requires_grad}) for model in self._outermost()]
        return [model for model, ids in candidates if ids & trained] or [model for model, ids in candidates if ids]

    def _outermost(self) -> list["nn.Module"]:
        """The modules that ran forward, without the parts of other modules."""
        inner = {id(module) for model in self.models.values() for module in model.modules() if module is not model}
        return [model for number, model in self.models.items() if number not in inner]
