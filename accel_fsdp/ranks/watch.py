"""Watches a training script from inside its rank: prepared models, batches, losses, steps, saves.

It changes no behaviour: each replaced function calls the original with the same arguments and then reports an event.
"""

import dataclasses
import functools
import math
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from accel_fsdp.checkpoints import completeness
from accel_fsdp.errors import in_a_line
from accel_fsdp.ranks import collectives, drawn_rows, events, hang, holding, observing, script
from accel_fsdp.ranks.drawn_rows import ObservedRows
from accel_fsdp.ranks.holding import measure, unwrapped
from accel_fsdp.ranks.observing import Observation, after, before, guarded, replace
from accel_fsdp.ranks.saves import ObservedSaves
from accel_fsdp.ranks.steps import ObservedSteps

if TYPE_CHECKING:
    import torch
    from torch import nn


HOLDING = Observation("what each rank holds", *holding.RELIES_ON)
RELIES_ON = drawn_rows.LOADERS.relies_on
HOLD_AFTER = "ACCEL_FSDP_HOLD_AFTER"
"""The variable that names a checkpoint: in the first step after it is complete, a rank waits to be killed."""


def begin() -> Callable[[], None]:
    """Installs the watch before the script imports anything; returns the function to call when the script has ended."""
    watch = _Watch()
    watch.install()
    return watch.report_end


def tell_failure(error: BaseException) -> None:
    """Reports the error that ended the script, and the innermost line of the script that was running."""
    collective = hang.collective_of_error(error)
    events.report("failed", error=in_a_line(error), line=script.line_of_error(error), collective=collective)
    collectives.report()


def _check_prepared(call: str, accelerator: Any, *_: Any, **__: Any) -> None:
    """Reports a save or a load before anything was prepared: it silently writes or reads no weights."""
    if not (accelerator._models or accelerator._optimizers or accelerator._custom_objects):
        events.report("state-of-nothing", call=call, line=script.line_of_stack(sys._getframe(2)))


def _only_creates_states() -> bool:
    """Whether this is torch's step with gradients of 0, which creates an optimizer's states for a save or a load."""
    frame: FrameType | None = sys._getframe(1)
    while frame and frame.f_code.co_name != "_init_optim_state":
        frame = frame.f_back
    return frame is not None


class _Watch:
    """Observes the first step: the outermost modules that ran forward before it.

    `classes` are the layer classes by which Accelerate wrapped a model, by the id of the user's module.
    """

    def __init__(self) -> None:
        hold_after = os.environ.get(HOLD_AFTER)
        self.hold_after = Path(hold_after) if hold_after else None
        self.measures = HOLDING.is_possible
        self.is_first = True
        self.depth = 0
        self.models: dict[int, Any] = {}
        self.called_at: dict[int, str] = {}
        self.classes: dict[int, tuple[str, ...]] = {}
        self.in_backward = False
        self.stepped_in_backward: Any = None
        self.drawn = ObservedRows()
        self.records = ObservedSteps()
        self.saves = ObservedSaves(self.records)
        self.module_hooks: list[Any] = []

    def install(self) -> None:
        import torch
        from accelerate import Accelerator
        from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        before(torch.Tensor, "backward", self._before_backward)
        after(torch.Tensor, "backward", self.ran_backward)
        replace(Accelerator, "prepare", self._prepare)
        for name in ("save_state", "load_state"):
            before(Accelerator, name, functools.partial(_check_prepared, name))
        self.module_hooks = [
            register_module_forward_pre_hook(guarded(self._enter)),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        register_optimizer_step_pre_hook(guarded(self._before_step))
        if drawn_rows.LOADERS.is_possible:
            self.drawn.install()
        self.records.install()
        self.saves.install()

    def _prepare(self, original: Callable[..., Any], accelerator: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(accelerator, *args, **kwargs)
        guarded(self._measure_prepared)(accelerator, result if isinstance(result, tuple | list) else (result,))
        return result

    def _measure_prepared(self, accelerator: Any, prepared: Sequence[Any]) -> None:
        from torch import nn

        plugin = getattr(accelerator.state, "fsdp_plugin", None)
        for model in (item for item in prepared if isinstance(item, nn.Module)):
            self.classes[id(unwrapped(model))] = getattr(plugin, "transformer_cls_names_to_wrap", None) or ()
            self._report_holding("prepared", model)

    def _report_holding(self, kind: str, model: "nn.Module", **more: Any) -> None:
        if self.measures:
            holding = dataclasses.replace(measure(model), classes=self.classes.get(id(unwrapped(model)), ()))
            events.report(kind, holding=dataclasses.asdict(holding), **more)

    def _enter(self, module: "nn.Module", *_: Any) -> None:
        import torch

        if observing.is_paused:
            return
        if self.depth == 0:
            self.models[id(module)] = module
            if torch.is_grad_enabled() and not self.in_backward and id(module) not in self.called_at:
                self.called_at[id(module)] = script.line_of_call(sys._getframe(), module)
        self.depth += 1

    def _leave(self, *_: Any) -> None:
        self.depth -= not observing.is_paused

    def _before_backward(self, *_: Any, **__: Any) -> None:
        self.in_backward = True
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
        for model in models:
            self._report_holding("stepped", model, line=self.called_at.get(id(model), ""))
        self.models.clear()

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
