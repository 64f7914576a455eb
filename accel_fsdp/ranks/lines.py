"""Observes which of the script's own lines clear gradients, or keep them on a rank.

Repeating an update shows that something is wrong in it; these lines show the user what to change.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

from accel_fsdp.ranks import script
from accel_fsdp.ranks.observing import replace


class ObservedLines:
    """`cleared`: the line that cleared gradients last; `unsynced`: the one that currently turns off their reduction."""

    def __init__(self) -> None:
        self.cleared = self.unsynced = ""

    def install(self) -> Iterator[Callable[[], None]]:
        """Yields functions that remove the hooks again."""
        import torch
        import torch.distributed.fsdp as fsdp
        from torch.nn.parallel import DistributedDataParallel

        for owner in (torch.optim.Optimizer, torch.nn.Module):
            yield replace(owner, "zero_grad", self._record_clearing)
        for wrapper in (DistributedDataParallel, fsdp.FullyShardedDataParallel):
            yield replace(wrapper, "no_sync", self._not_syncing)
        yield replace(fsdp.FSDPModule, "set_requires_gradient_sync", self._setting_sync)

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
