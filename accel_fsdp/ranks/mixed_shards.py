"""Observes collectives that a script itself calls, and those with its rank's shard of a weight or a gradient."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from accel_fsdp.ranks import events, parts, script
from accel_fsdp.ranks.observing import before, caller

if TYPE_CHECKING:
    from torch import nn

COLLECTIVES = ("all_reduce", "broadcast", "reduce")
OF_ACCELERATE = "accelerate.utils.operations"
MOST_CALLS = 50
"""The calls that are observed, as each looks through all weights."""


class ObservedShards:
    """Reports the first call at each line that takes a shard; where the rank's shard is empty, without a name.

    Also reports once that the script combines tensors of the ranks, as where it averages gradients or weights itself. A
    single number may be a loss that is logged.
    """

    def __init__(self, models: Callable[[], Iterable["nn.Module"]]) -> None:
        self.models = models
        self.calls = 0
        self.combines = False
        self.lines: set[str] = set()

    def install(self) -> None:
        import torch.distributed as dist

        for name in COLLECTIVES:
            before(dist, name, functools.partial(self._observe, name, inspect.signature(getattr(dist, name))))

    def _observe(self, call: str, signature: inspect.Signature, *args: Any, **kwargs: Any) -> None:
        by = caller()
        is_own = script.is_calling(by)
        if self.calls >= MOST_CALLS or not (is_own or (by and by.f_globals.get("__name__") == OF_ACCELERATE)):
            return
        given = signature.bind(*args, **kwargs).arguments
        line, tensor = script.line_of_stack(by), parts.local(given["tensor"])
        self.calls += tensor.numel() != 1
        if tensor.numel() > 1 and not self.combines:
            self.combines = True
            events.report("combines", line=line)
        if is_own and line not in self.lines:
            self._report(call, tensor, given.get("group"), line)

    def _report(self, call: str, tensor: Any, group: Any, line: str) -> None:
        import torch.distributed as dist

        if not (place := self._place_of(tensor)):
            return
        self.lines.add(line)
        name, start = place
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        shape = list(tensor.shape)
        events.report("shard-given", call=call, name=name, start=start, shape=shape, ranks=ranks, line=line)

    def _place_of(self, tensor: Any) -> tuple[str, Any] | None:
        """The name of the shard and where it starts; None for other tensors."""
        if not tensor.numel():
            return "", None
        for place in (place for model in self.models() for place in parts.places(model) if not parts.is_whole(place)):
            for what, shard in (("", place.parameter), ("the gradient of ", place.parameter.grad)):
                local = parts.local(shard)
                if local is not None and (local.data_ptr(), local.numel()) == (tensor.data_ptr(), tensor.numel()):
                    return what + place.name, place.start
        return None
