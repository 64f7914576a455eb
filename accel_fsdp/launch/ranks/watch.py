"""Watches a training script from inside its rank: models that are prepared, batches, losses, steps, saves.

It changes nothing. What is replaced here calls what it replaces with the same arguments, and then tells what it saw.
"""

import dataclasses
import functools
import inspect
import math
import os
import signal
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from accel_fsdp.checkpoints import completeness
from accel_fsdp.errors import in_a_line
from accel_fsdp.launch.ranks import events, holding, script
from accel_fsdp.launch.ranks.holding import is_unit, measure, unwrapped, user_name
from accel_fsdp.launch.ranks.observing import Observation
from accel_fsdp.launch.ranks.saves import Saves
from accel_fsdp.launch.ranks.weights import Weights, shards_in
from accel_fsdp.library_internals import Internal

if TYPE_CHECKING:
    import torch
    from torch import nn


LOSSES = Observation("losses and backward passes", (Internal("torch:Tensor.backward", "self gradient *"),))
TORCH_SAVES = Observation("what torch.save writes", (Internal("torch:save", "obj f *"),))
CLIPPING = Observation("clipping by torch's function", (Internal("torch.nn.utils:clip_grad_norm_", "parameters *"),))
CHECKPOINTING = Observation(
    "random numbers under activation checkpointing",
    (
        Internal("torch.utils.checkpoint:checkpoint", "function *"),
        Internal("torch.distributed.algorithms._checkpoint.checkpoint_wrapper:torch_utils_checkpoint"),
    ),
)
PREPARING = Observation(
    "what Accelerate prepares", (Internal("accelerate:Accelerator.prepare", "self args device_placement"),)
)
TRACKERS = Observation("trackers", (Internal("accelerate:Accelerator.__init__", "self * log_with"),))
STEPS = Observation(
    "rows, units and steps",
    (
        Internal("torch.nn.modules.module:register_module_forward_pre_hook", "hook"),
        Internal("torch.nn.modules.module:register_module_forward_hook", "hook * always_call"),
        Internal("torch.optim.optimizer:register_optimizer_step_pre_hook", "hook"),
    ),
)
HOLDING = Observation("what each rank holds", holding.RELIES_ON)
OBSERVED = (LOSSES, TORCH_SAVES, CLIPPING, CHECKPOINTING, PREPARING, TRACKERS, STEPS)
RELIES_ON = tuple(internal for one in OBSERVED for internal in one.relies_on)
HOLD_AFTER = "ACCEL_FSDP_HOLD_AFTER"
"""The variable that names a checkpoint: in the first step after it is complete a rank waits, to be killed there."""


def begin() -> Callable[[], None]:
    """Puts the watch in place, before the script imports anything; returns what to call when the script has ended."""
    import torch

    steps = _Steps(os.environ.get(HOLD_AFTER), HOLDING.is_possible)
    if LOSSES.is_possible:
        _after(torch.Tensor, "backward", steps.ran_backward)
    if TORCH_SAVES.is_possible:
        _after(torch, "save", steps.torch_saved)
    if CLIPPING.is_possible:
        _after(torch.nn.utils, "clip_grad_norm_", _tell_clipping)
    if CHECKPOINTING.is_possible:
        _watch_checkpointing()
    if TRACKERS.is_possible:
        _watch_trackers()
    if PREPARING.is_possible:
        _watch_prepare(steps.measures)
    steps.install()
    return steps.tell_end


def tell_failure(error: BaseException) -> None:
    """An event with what ended the script, and the innermost line of it that was running."""
    events.tell(
        "failed",
        error=in_a_line(error),
        line=script.line_of_error(error),
        wrapped=_of_wrapped(error),
    )


def _of_wrapped(error: BaseException) -> str:
    """The name of an attribute that a wrapper such as DDP lacks and that the model in it has; else empty."""
    import torch

    if not isinstance(error, AttributeError) or not isinstance(error.obj, torch.nn.Module):
        return ""
    inner, name = unwrapped(error.obj), error.name or ""
    return name if inner is not error.obj and hasattr(inner, name) else ""


def _after(owner: Any, name: str, then: Callable[..., None]) -> None:
    """Calls `then` with the same arguments after each call of a function."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def watched(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        then(*args, **kwargs)
        return result

    setattr(owner, name, watched)


def _tell_clipping(parameters: Any, *_: Any, **__: Any) -> None:
    """By torch's own function, called in the script itself: it knows nothing of FSDP1's shards."""
    if script.is_calling(sys._getframe(2)):
        events.tell("clipped", line=script.line_of_stack(sys._getframe(2)))


def _watch_checkpointing() -> None:
    """Looks whether layers draw random numbers where those of their second run will be others.

    Accelerate's own wrapper for FSDP2 runs them so (1.15), which matters to dropout alone.
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
            events.tell("forgot-rng", line=script.line_of_stack(caller), by_wrapper=by_wrapper)
        return result

    checkpointing.checkpoint = checkpoint
    wrappers.torch_utils_checkpoint = checkpoint  # type: ignore[attr-defined]


def _watch_trackers() -> None:
    """Accelerate drops a tracker that isn't installed, and logs nothing at the level that people see."""
    from accelerate import Accelerator

    parameters = inspect.signature(Accelerator.__init__)

    def made(*args: Any, **kwargs: Any) -> None:
        asked = parameters.bind(*args, **kwargs).arguments.get("log_with")
        names = [str(getattr(one, "value", one)) for one in (asked if isinstance(asked, list | tuple) else [asked])]
        kept = [str(getattr(one, "value", one)) for one in args[0].log_with]
        if asked is not None and (lacking := [name for name in names if name not in (*kept, "all")]):
            events.tell("no-tracker", names=lacking, line=script.line_of_stack(sys._getframe(2)))

    _after(Accelerator, "__init__", made)


def _watch_prepare(measures: bool) -> None:
    """Measures each model that Accelerate prepares, and looks before which of its modules share a weight."""
    import torch
    from accelerate import Accelerator

    original = Accelerator.prepare

    @functools.wraps(original)
    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = [_shared(one) for one in args if isinstance(one, torch.nn.Module)]
        result = original(self, *args, **kwargs)
        made = result if isinstance(result, tuple | list) else (result,)
        if any(isinstance(one, torch.utils.data.DataLoader) for one in made):
            events.tell("prepared-rows")
        models = [one for one in made if isinstance(one, torch.nn.Module)]
        for model, shared in zip(models, before, strict=False) if measures else ():
            _tell_holding("prepared", model, shared=shared)
        return result

    Accelerator.prepare = prepare


def _shared(model: "nn.Module") -> list[list[str]]:
    """The names of each weight that has several, such as that of embedding and head."""
    names: dict[int, list[str]] = {}
    for name, one in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(one), []).append(name)
    return [several for several in names.values() if len(several) > 1]


def _tell_holding(kind: str, model: "nn.Module", **more: Any) -> None:
    events.tell(kind, holding=dataclasses.asdict(measure(model)), **more)


def _only_makes_states() -> bool:
    """Whether torch steps with gradients of 0, so that an optimizer that never stepped has states to save or load."""
    frame: FrameType | None = sys._getframe(1)
    while frame and frame.f_code.co_name != "_init_optim_state":
        frame = frame.f_back
    return frame is not None


class _Steps:
    """What the first step of an optimizer trains: the outermost modules that ran forward before it, and their rows."""

    def __init__(self, hold_after: str | None, measures: bool) -> None:
        self.measures = measures
        self.hold_after = Path(hold_after) if hold_after else None
        self.is_first = True
        self.depth = 0
        self.models: dict[int, Any] = {}
        self.rows: list[int] = []
        self.units: list[int] = []
        self.awaits_rows = False
        self.rows_line = ""
        self.saves = Saves()
        self.weights = Weights()

    def install(self) -> None:
        self.weights.install()
        self.of_modules: list[Any] = []
        if not STEPS.is_possible:
            return
        from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self.of_modules = [
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
            self.rows_line = self.rows_line or script.line_of_stack(sys._getframe())
            self.rows.append(zlib.crc32(args[0].detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()))

    def _leave(self, *_: Any) -> None:
        self.depth -= 1

    def ran_backward(self, loss: "torch.Tensor", *_: Any, **__: Any) -> None:
        if loss.numel() == 1:
            value = float(loss.detach())
            line = "" if math.isfinite(value) else script.line_of_stack(sys._getframe(2))
            events.tell("loss", value=value, step=self.weights.steps + 1, line=line)
        self.weights.ran_backward(self._outermost())

    def torch_saved(self, saved: Any, f: Any = None, *_: Any, **__: Any) -> None:
        """After each `torch.save`; a library that saves shards knows how to read them."""
        file = f if isinstance(f, str | os.PathLike) else getattr(f, "name", None)
        if isinstance(file, str | os.PathLike) and script.is_calling(sys._getframe(2)):
            shards, tensors = shards_in(saved, self.weights.shard_storages())
            if shards:
                line = script.line_of_stack(sys._getframe(2))
                events.tell("saved-shards", file=os.path.abspath(file), shards=shards, tensors=tensors, line=line)

    def tell_end(self) -> None:
        """When the script has come to its end."""
        self.weights.tell_end(self._outermost())

    def _step(self, optimizer: Any, *_: Any) -> None:
        if _only_makes_states():
            return
        self.weights.steps_now(optimizer, self._outermost())
        if self.is_first:
            self.is_first = False
            self._tell_first(optimizer)
        if self.hold_after is not None and self.hold_after.is_dir() and not completeness.flaw(self.hold_after):
            events.tell("held")
            signal.pause()

    def _tell_first(self, optimizer: Any) -> None:
        for hook in self.of_modules:
            hook.remove()
        trained = {id(one) for group in optimizer.param_groups for one in group["params"]}
        for model, own in self._trained_by(trained):
            name = type(unwrapped(model)).__name__
            line = self.weights.made_at.get(id(optimizer), "")
            events.tell("optimizer", model=name, missing=len(own - trained), strange=len(trained - own), line=line)
            if self.measures:
                _tell_holding("stepped", model)
            names = {id(module): user_name(path) for path, module in model.named_modules()}
            events.tell("units", names=[names[unit] for unit in self.units if unit in names])
        events.tell("rows", hashes=self.rows, line=self.rows_line)
        self.models.clear()

    def _trained_by(self, trained: set[int]) -> list[tuple["nn.Module", set[int]]]:
        """The outermost modules of which an optimizer has parameters; all that can be trained, if it has of none.

        A reference model of DPO has gradients and no optimizer.
        """
        able = [(model, {id(one) for one in model.parameters() if one.requires_grad}) for model in self._outermost()]
        able = [(model, own) for model, own in able if own]
        return [(model, own) for model, own in able if own & trained] or able

    def _outermost(self) -> list["nn.Module"]:
        """Of the modules that ran forward: others ran again by themselves."""
        inner = {id(one) for model in self.models.values() for one in model.modules() if one is not model}
        return [model for number, model in self.models.items() if number not in inner]
