"""Observes collectives that a script itself calls with its rank's shard of a weight or a gradient."""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from accel_fsdp.ranks import events, parts, script
from accel_fsdp.ranks.lines import COLLECTIVES
from accel_fsdp.ranks.observing import replace

if TYPE_CHECKING:
    from torch import nn

MOST_CALLS = 50
"""The calls that are observed, as each looks through all weights."""


class ObservedShards:
    """Reports the first call at each line that takes a shard; where the rank's shard is empty, without a name."""

    def __init__(self, models: Callable[[], Iterable["nn.Module"]]) -> None:
        self.models = models
        self.calls = 0
        self.lines: set[str] = set()

    def install(self) -> Iterator[Callable[[], None]]:
        import torch.distributed as dist

        for name in COLLECTIVES:
            yield replace(dist, name, self._call)

    def _call(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.calls < MOST_CALLS and script.is_calling(sys._getframe(2)):
            self.calls += 1
            given = inspect.signature(original).bind(*args, **kwargs).arguments
            self._report(original.__name__, parts.local(given["tensor"]), given.get("group"))
        return original(*args, **kwargs)

    def _report(self, call: str, tensor: Any, group: Any) -> None:
        import torch.distributed as dist

        line = script.line_of_stack(sys._getframe(3))
        if line in self.lines or not (place := self._place_of(tensor)):
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
