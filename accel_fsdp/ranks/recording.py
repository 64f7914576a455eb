"""Records the first updates of a script on each rank, so that one plain process can repeat them (`replay.py`).

Only the forward pass of the model is repeated, not the script: its inputs are recorded, and the gradients of its
outputs, however the script computed its loss from them. An update ends with the steps of its optimizers.
"""

import functools
import os
import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_fsdp.errors import in_a_line, is_installed
from accel_fsdp.launch_environment import LaunchEnvironment
from accel_fsdp.library_internals import Internal
from accel_fsdp.ranks import accumulation, events, outputs, parts, precision, script
from accel_fsdp.ranks.copies import Copy, changed_buffers, copied, has_hooks, hooks_of, loaded_in_shards, outermost
from accel_fsdp.ranks.holding import unwrapped, user_name
from accel_fsdp.ranks.mixed_shards import ObservedShards
from accel_fsdp.ranks.observing import Observation, after, before, replace
from accel_fsdp.ranks.outputs import members, with_member
from accel_fsdp.ranks.parts import Parts, Place
from accel_fsdp.ranks.records import Clip, Forward, Step, Unrecordable, Update, recorded, setting, states_of

if TYPE_CHECKING:
    import torch
    from torch import nn

RECORDS = "ACCEL_FSDP_RECORDS"
"""The variable that names the folder of recorded updates; if it isn't set, nothing is recorded."""
MOST_UPDATES = 2
KNOWN_OPTIMIZERS = ("torch.optim.", "transformers.")
"""Modules whose optimizers communicate with no other rank in a step."""
DEEPSPEED = "DeepSpeed's engine reduces, clips and clears gradients itself, and steps on copies of its own"
UPDATES = Observation(
    "updates, to repeat them in one process",
    *parts.RELIES_ON,
    Internal("torch.optim:Optimizer._optimizer_step_pre_hooks"),
    Internal("torch.optim:Optimizer._optimizer_step_post_hooks"),
)


def begin() -> "Recorder | None":
    """Begins to record if a rehearsal requests it, before the script imports anything."""
    folder = os.environ.get(RECORDS)
    if folder and LaunchEnvironment.now().uses_deepspeed:
        events.report("unrepeated", why=DEEPSPEED)
        return None
    if not folder or not UPDATES.is_possible:
        return None
    recorder = Recorder(Path(folder))
    recorder.install()
    return recorder


class Recorder:
    """Records updates until there are `MOST_UPDATES`; then it removes its hooks."""

    def __init__(self, folder: Path) -> None:
        import torch

        self.folder, self.save = folder, torch.save  # the original, as the watch will replace it
        self.copies: list[Copy] = []
        self.optimizers: list[list[Any]] = []
        self.prepared: dict[int, weakref.ref[nn.Module]] = {}
        self.models: weakref.WeakKeyDictionary[nn.Module, tuple[int, str]] = weakref.WeakKeyDictionary()
        self.places: list[Place] = []
        self.update: Update | None = None
        self.written = 0
        self.depth = 0
        self.in_backward = self.in_step = self.is_scaled = False
        self.clips: list[Clip] = []
        self.covered: set[str] | None = None
        self.why = self.wrapped_at = ""
        self.boundary: list[Any] = []
        self.returned: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.remove: list[Callable[[], None]] = []

    def install(self) -> None:
        import torch
        import torch.distributed.fsdp as fsdp
        from torch.nn.parallel import DistributedDataParallel
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        before(DistributedDataParallel, "__init__", lambda _, module, *__, **___: self.keep(module))
        before(fsdp.FullyShardedDataParallel, "__init__", lambda _, module, *__, **___: self._keep_whole(module))
        before(fsdp, "fully_shard", lambda module, *_, **__: self._keep_whole(module))
        for wrapper in (DistributedDataParallel, fsdp.FullyShardedDataParallel):
            after(wrapper, "__init__", lambda model, *_, **__: self.prepare(model))
        if is_installed("accelerate"):
            from accelerate import Accelerator

            before(Accelerator, "prepare", self.keep_all)
        after(fsdp, "fully_shard", lambda module, *_, **__: self.prepare(module))
        before(torch.nn.utils, "clip_grad_norm_", self._record_clipping)
        before(fsdp.FullyShardedDataParallel, "clip_grad_norm_", self._record_clipping)
        self.remove.append(replace(torch.nn.Module, "__call__", self._record_call))
        self.remove.append(replace(torch.autograd, "backward", self._record_backward))
        self.remove.append(replace(torch.autograd, "grad", self._differentiate))
        ObservedShards(lambda: self._live_models().values()).install()
        begin_step, end_step = (functools.partial(self._try, observe) for observe in (self._begin_step, self._end_step))
        hooks = [register_optimizer_step_pre_hook(begin_step), register_optimizer_step_post_hook(end_step)]
        self.remove += [hook.remove for hook in hooks]
        after(torch.amp.GradScaler, "__init__", self._note_scaler)

    def keep(self, root: "nn.Module") -> None:
        """Copies a model before it is sharded, unless it is a part of a copied one."""
        if root in self.models:
            return
        number = len(self.copies)
        if not self.copies:
            self.wrapped_at = script.line_of_stack(sys._getframe(2))
            events.report("wrapped", line=self.wrapped_at)
        self.copies.append(copied(root))
        self.models |= {inner: (number, path) for path, inner in root.named_modules()}
        self.prepared[number] = weakref.ref(root)

    def _keep_whole(self, part: Any) -> None:
        """Copies the model that a module, or the first of a list of modules, is a part of."""
        module = part[0] if isinstance(part, list) else part
        if module not in self.models:
            self.keep(outermost(module))

    def keep_all(self, accelerator: Any, *args: Any, **kwargs: Any) -> None:
        from torch import nn

        for model in args:
            if isinstance(model, nn.Module):
                self.keep(model)

    def _note_scaler(self, *_: Any, **__: Any) -> None:
        self.is_scaled = True

    def prepare(self, model: "nn.Module") -> None:
        """Called with a model after it, or a part of it, has been sharded; wrappers around it are among its modules."""
        if isinstance(model, list) or (known := self.models.get(unwrapped(model))) is None:
            return
        number, prefix = known
        for path, inner in model.named_modules():
            self.models[inner] = (number, ".".join(filter(None, (prefix, user_name(path)))))
        if not prefix:
            self.prepared[number] = weakref.ref(model)

    def end(self) -> None:
        """Ends the last update, at the end of the script."""
        self._close()
        self._stop()

    def _stop(self) -> None:
        while self.remove:
            self.remove.pop()()

    def _record_call(self, original: Callable[..., Any], module: "nn.Module", *args: Any, **kwargs: Any) -> Any:
        import torch

        if torch.compiler.is_compiling():  # this call is part of a recorded forward pass
            return original(module, *args, **kwargs)
        if self.depth or self.in_backward or not torch.is_grad_enabled():
            return original(module, *args, **kwargs)
        if not self.copies and loaded_in_shards(module):
            self.keep(module)
        if module not in self.models:
            return original(module, *args, **kwargs)
        forward = self._try(self._begin_forward, module, args, kwargs)
        self.depth += 1
        try:
            result = original(module, *args, **kwargs)
        finally:
            self.depth -= 1
        watched = None if forward is None else self._try(self._watch_output, forward, result)
        return result if watched is None else watched

    def _try(self, observe: Callable[..., Any], *args: Any) -> Any:
        """Records something; after an error the update can't be repeated, and the script goes on."""
        try:
            return observe(*args)
        except Exception as error:  # of a library's or the user's object
            self.why = self.why or in_a_line(error)
            if self.update is not None:
                self.update.why = self.update.why or self.why
            return None

    def _begin_forward(self, module: "nn.Module", args: Any, kwargs: Any) -> Forward | None:
        import torch

        if self.update is not None and self.in_step:
            self.update.why = "a closure makes the gradients within the optimizer's step"
            return None
        if self.update is not None and self.update.steps:
            self._close()
        if self.written >= MOST_UPDATES:
            self._stop()
            return None
        if self.update is None:
            self.update = self.begin_update()
        elif not parts.same(self.update.weights, self._weights()):
            self.update.why = self.update.why or "weights change between two forward passes of a step"
        number, path = self.models[module]
        try:
            inputs = recorded([list(args), dict(kwargs)])
        except Unrecordable as problem:
            self.update.why = self.update.why or str(problem)
            return None
        inner = unwrapped(module)
        evaluating = [name for name, part in inner.named_modules() if not part.training]
        forward = Forward(number, path, inputs, torch.get_rng_state(), [user_name(name) for name in evaluating])
        forward.buffers = changed_buffers(module, path, self.copies[number].buffers)
        self.update.forwards.append(forward)
        return forward

    def begin_update(self) -> Update:
        models = self._live_models()
        why = self.why or next((kept.why for kept in self.copies if kept.why), "")
        if len(models) > 1:
            why = why or "several models are trained"
        if any(hooks_of(model) != self.copies[number].hooks for number, model in models.items()):
            why = why or "hooks were added to the model after it was sharded"
        self.places = [place for model in models.values() for place in parts.places(model)]
        trained = [place.name for place in self.places if place.parameter.requires_grad]
        if any(map(has_hooks, (place.parameter for place in self.places))):
            why = why or "weights have hooks"
        weights = self._weights()
        model = next(iter(models.values()))
        if hook := precision.other_reduction(model):
            why = why or f"{hook} reduces gradients to something else than their mean"
        update = Update(weights, trained, precision.of(model), precision.cast(model), precision.reduces(model), why=why)
        update.accumulation, update.unsharded = accumulation.batches(), parts.unsharded(self.places)
        update.divisor, update.scaled = precision.divisor(model), self.is_scaled
        update.clips, self.clips = self.clips, []
        return update

    def _live_models(self) -> "dict[int, nn.Module]":
        return {number: model for number, model_ref in self.prepared.items() if (model := model_ref()) is not None}

    def _weights(self) -> Parts:
        return parts.parts(self.places, lambda parameter: parameter if parameter.is_floating_point() else None)

    def _watch_output(self, forward: Forward, value: Any, path: str = "") -> Any:
        """A module's output, with a copy of each tensor: an output may be a part of another, as logits of a loss.

        The gradient of a copy thus comes only from code outside of the module.
        """
        import torch

        if isinstance(value, torch.Tensor):
            return self._watch_tensor(forward, value, path)
        prefix = f"{path}." if path else ""
        for key, inner in members(value):
            watched = self._watch_output(forward, inner, f"{prefix}{key}")
            if watched is not inner:
                value = with_member(value, key, watched)
        return value

    def _watch_tensor(self, forward: Forward, tensor: "torch.Tensor", path: str) -> "torch.Tensor":
        number = len(forward.gradients)
        forward.gradients.append(None)
        if path == "loss" and tensor.numel() == 1:
            forward.loss = number
        if not tensor.requires_grad:
            return tensor
        forward.outputs[number] = tensor.detach().cpu().clone()
        watched = tensor.clone()
        watched.register_hook(  # type: ignore[no-untyped-call]
            functools.partial(self._record_gradient, forward, number)
        )
        self.boundary.append(watched.grad_fn)
        self.returned.append((watched, tensor))
        return watched

    def _record_gradient(self, forward: Forward, number: int, gradient: "torch.Tensor") -> None:
        if not self.in_backward:  # torch.autograd.grad, which leaves no gradient in a weight
            return
        last = forward.gradients[number]
        now = gradient.detach().cpu().clone()
        forward.gradients[number] = now if last is None else last + now

    def _differentiate(self, original: Callable[..., Any], outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Differentiates with respect to the original outputs, not the copies: a loss among them depends on no copy."""
        parameters = inputs if isinstance(inputs, list | tuple) else [inputs]
        copies = {id(copied_output): returned for copied_output, returned in self.returned}
        return original(outputs, [copies.get(id(tensor), tensor) for tensor in parameters], *args, **kwargs)

    def _record_backward(self, original: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> None:
        update = self.update
        if update is not None and not self.in_backward:
            roots = tensors if isinstance(tensors, list | tuple) else [tensors]
            names = {id(place.parameter): place.name for place in self.places}
            reached = self._try(outputs.reached, roots, self.boundary, names) or outputs.Reached(False, "")
            if reached.weight:
                update.why = update.why or f"{reached.weight} is used outside of the model's forward"
            if reached.weight or reached.outputs:
                self._try(self.check_kept, update)
            else:  # no gradient comes to the model
                update = None
        nested, self.in_backward = self.in_backward, True
        try:
            original(tensors, *args, **kwargs)
        finally:
            self.in_backward = nested
        if update is not None and not nested:
            update.line = script.line_of_stack(sys._getframe(2))
            update.backwards += 1
            update.reduced = self._try(self._gradients) or {}
            update.unsynced = self._try(self._unsynced_at, update.line) or ""

    def _unsynced_at(self, line: str) -> str:
        """The script's line that keeps gradients on each rank; empty if they are reduced."""
        is_unsynced = any(map(precision.is_unsynced, self._live_models().values()))
        return script.nearest_line(line, "no_sync", "set_requires_gradient_sync") if is_unsynced else ""

    def check_kept(self, update: Update) -> None:
        """Compares the gradients before a backward pass with those after the last one."""
        now = self._gradients()
        if not parts.same(self._used_gradients(update.reduced), self._used_gradients(now)):
            update.dropped |= bool(update.backwards) and not self.in_step and not parts.not_zero(now)
            moment = "between two backward passes of a step" if update.backwards else "before it"
            update.why = update.why or f"gradients are kept, cleared or changed {moment}"

    def _used_gradients(self, gradients: Parts) -> Parts:
        """The gradients that aren't 0, without weights outside the last step's optimizers: those may accumulate."""
        covered = self.covered
        return {name: part for name, part in parts.not_zero(gradients).items() if covered is None or name in covered}

    def _gradients(self) -> Parts:
        return parts.parts(self.places, lambda parameter: parameter.grad)

    def _begin_step(self, optimizer: Any, *_: Any) -> None:
        update = self.update
        if update is None:
            return
        self.in_step = True
        update.midway = accumulation.is_midway()
        update.unprepared |= bool(update.unsynced) and not accumulation.is_last()
        names = parts.names_of(self.places)
        names_by_group = [
            [name for p in group["params"] for name in names.get(id(p), [])] for group in optimizer.param_groups
        ]
        places = self._places(names_by_group)
        settings = [
            {key: setting(value) for key, value in g.items() if key != "params"} for g in optimizer.param_groups
        ]
        is_known = f"{type(optimizer).__module__}.".startswith(KNOWN_OPTIMIZERS)  # others' states may refuse a copy
        states = {p.name: states_of(optimizer.state.get(p.parameter, {}), p) for p in places if is_known}
        has_hooks = bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
        update.steps.append(Step(names_by_group, settings, states, script.line_of_stack(sys._getframe(2)), has_hooks))
        update.used |= parts.parts(places, lambda parameter: parameter.grad)

    def _end_step(self, optimizer: Any, *_: Any) -> None:
        self.in_step = False
        if self.update is None or not self.update.steps:
            return
        self.update.after |= parts.parts(self._places(self.update.steps[-1].names), lambda parameter: parameter)
        if len(self.optimizers) <= self.written:
            self.optimizers.append([])
        self.optimizers[self.written].append(optimizer)

    def _places(self, names: Iterable[Iterable[str]]) -> list[Place]:
        """The locations of the weights in an optimizer's groups."""
        trained = {name for group in names for name in group}
        return [place for place in self.places if place.name in trained]

    def _record_clipping(self, parameters: Any, max_norm: Any, norm_type: Any = 2.0, *_: Any, **__: Any) -> None:
        update = self.update if self.update and not self.update.steps else None  # after its step it is the next one's
        passes, clips = (update.backwards, update.clips) if update else (0, self.clips)
        clips.append(Clip(float(max_norm), float(norm_type), passes, script.line_of_stack(sys._getframe(2))))

    def _close(self) -> None:
        """Writes an update that has ended with a step."""
        update, self.update, self.boundary, self.returned = self.update, None, [], []
        if update is None or not update.steps:
            return
        self.covered = {name for step in update.steps for group in step.names for name in group}
        rank = LaunchEnvironment.now().rank
        path = self.folder / f"{rank}.{self.written}"
        try:
            self.save(asdict(update), f"{path}.part")
        except Exception as error:  # of values in an optimizer's settings
            unrecorded = Update(update.weights, update.trained, "no", "no", "no", why=in_a_line(error))
            self.save(asdict(unrecorded), f"{path}.part")
        os.replace(f"{path}.part", path)
        self.written += 1
