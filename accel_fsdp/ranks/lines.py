"""Observes which of the script's own lines change weights or gradients, clear gradients, or keep them on a rank.

Repeating an update shows that something is wrong in it; these lines show the user what to change.
"""

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from accel_fsdp.library_internals import Internal
from accel_fsdp.ranks import events, parts, script
from accel_fsdp.ranks.holding import user_name
from accel_fsdp.ranks.observing import before, replace
from accel_fsdp.ranks.parts import Place

if TYPE_CHECKING:
    import torch
    from torch import nn

METHODS = (
    *("__iadd__", "__imul__", "__isub__", "__itruediv__", "__setitem__", "add_", "addcmul_", "clamp_", "copy_", "div_"),
    *("fill_", "lerp_", "masked_fill_", "mul_", "nan_to_num_", "normal_", "sub_", "uniform_", "zero_"),
)
"""Methods that change a tensor in place."""
COLLECTIVES = ("all_reduce", "broadcast", "reduce")
RELIES_ON = (
    *(Internal(f"torch:Tensor.{name}") for name in METHODS),
    *(Internal(f"torch.distributed:{name}", "tensor *") for name in COLLECTIVES),
    Internal("torch.optim:Optimizer.zero_grad", "self *"),
    Internal("torch.nn:Module.zero_grad", "self *"),
    Internal("torch.nn.parallel:DistributedDataParallel.no_sync", "self"),
    Internal("torch.distributed.fsdp:FullyShardedDataParallel.no_sync", "self"),
    Internal("torch.distributed.fsdp:FSDPModule.set_requires_gradient_sync", "self requires_gradient_sync *"),
)


class ObservedLines:
    """`is_outside` says whether the script runs neither forward and backward passes nor steps of the recorded model.

    `cleared` is the line that cleared gradients last, `unsynced` the line that currently turns off their reduction,
    `buffer_lines` has those that change buffers in a forward pass.
    """

    def __init__(self, is_outside: Callable[[], bool], places: Callable[[], Iterable[Place]]) -> None:
        self.is_outside, self.places = is_outside, places
        self.changed: dict[int, str] = {}
        self.buffers: dict[int, str] = {}
        self.buffer_lines: dict[str, str] = {}
        self.cleared = self.unsynced = ""
        self.has_averaged = False
        self.summed: tuple[torch.Tensor, torch.Tensor, str] | None = None

    def install(self) -> Iterator[Callable[[], None]]:
        """Yields functions that remove the hooks again; two hooks stay, for weights that are averaged later."""
        import torch
        import torch.distributed as dist
        import torch.distributed.fsdp as fsdp
        from torch.nn.parallel import DistributedDataParallel
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        before(dist, "all_reduce", self._record_sum)
        register_optimizer_step_pre_hook(self.report_averaging)
        for name in METHODS:
            yield replace(torch.Tensor, name, self._record_change)
        for name in COLLECTIVES:
            yield replace(dist, name, self._record_change)
        for owner in (torch.optim.Optimizer, torch.nn.Module):
            yield replace(owner, "zero_grad", self._record_clearing)
        for wrapper in (DistributedDataParallel, fsdp.FullyShardedDataParallel):
            yield replace(wrapper, "no_sync", self._not_syncing)
        yield replace(fsdp.FSDPModule, "set_requires_gradient_sync", self._setting_sync)

    def forget(self) -> None:
        self.changed, self.cleared = {}, ""

    def watch_buffers(self, model: "nn.Module") -> None:
        """Called before each forward pass, which may change buffers."""
        self.buffers = {_storage(buffer): user_name(name) for name, buffer in model.named_buffers()}

    def of(self, places: Iterable[Place], tensor_of: Callable[["torch.Tensor"], Any]) -> dict[str, str]:
        """The lines that changed the weights of `places`, or the tensors that `tensor_of` returns for them, by name."""
        tensors = {place.name: tensor_of(place.parameter) for place in places}
        lines = {name: self.changed.get(_storage(tensor), "") for name, tensor in tensors.items()}
        return {name: line for name, line in lines.items() if line}

    def _record_change(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        import torch

        if not torch.compiler.is_compiling():
            changed = _storage(args[0] if args else kwargs.get("tensor"))
            if self.is_outside():
                self.changed[changed] = script.line_of_stack(sys._getframe(2))
            elif name := self.buffers.get(changed):
                self.buffer_lines[name] = script.line_of_stack(sys._getframe(2))
        return original(*args, **kwargs)

    def _record_clearing(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.cleared = script.line_of_stack(sys._getframe(2)) or self.cleared
        return original(*args, **kwargs)

    @contextlib.contextmanager
    def _not_syncing(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
        line = script.line_of_stack(sys._getframe(2))
        with patch.object(self, "unsynced", line), original(*args, **kwargs):
            yield

    def _setting_sync(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        is_on = kwargs.get("requires_gradient_sync", *args[1:2])
        self.unsynced = "" if is_on else script.line_of_stack(sys._getframe(2))
        return original(*args, **kwargs)

    def _record_sum(self, tensor: Any, *_: Any, **__: Any) -> None:
        """Notes a weight that the script sums over ranks, or a copy of it."""
        if self.summed is None and not self.has_averaged and self.is_outside():
            weight = self._weight_of(parts.local(tensor).detach().flatten())
            if weight is not None:
                self.summed = weight, weight.detach().clone(), script.line_of_stack(sys._getframe(2))

    def report_averaging(self, *_: Any) -> None:
        """Reports that the script averages weights and not gradients: the summed one has changed before the next step.

        A copy that is summed only for a comparison changes no weight.
        """
        if self.summed is not None:
            weight, last, line = self.summed
            self.summed, self.has_averaged = None, not weight.equal(last)
            if self.has_averaged:
                events.report("averaged", line=line)

    def _weight_of(self, values: "torch.Tensor") -> "torch.Tensor | None":
        """The weight with these values, or the first if they are all weights' values, concatenated; None for shards."""
        whole = [place.parameter for place in self.places() if parts.is_whole(place) and place.parameter.requires_grad]
        if whole and len(values) == sum(weight.numel() for weight in whole):
            whole, values = whole[:1], values[: whole[0].numel()]
        candidates = (weight for weight in whole if weight.numel() == len(values))
        return next((weight for weight in candidates if weight.detach().flatten().equal(values.to(weight.dtype))), None)


def _storage(tensor: Any) -> int:
    """The address of this rank's part of a tensor; 0 for a tensor without storage."""
    try:
        return int(parts.local(tensor).untyped_storage().data_ptr())
    except Exception:  # None, or a tensor without storage
        return 0
