"""Reports errors that leave a model or a backward pass.

A script may catch such an error on one rank and leave the others in a collective.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from accel_fsdp.errors import in_a_line
from accel_fsdp.ranks import events, script

MOST = 8
"""The most errors that are reported: a script may catch one in each step."""


class ObservedErrors:
    """Reports errors that leave the outermost call; without an error it costs a few nanoseconds per FSDP unit."""

    def __init__(self) -> None:
        self.depth = self.reported = 0

    def install(self) -> None:
        import torch
        from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
        from torch.nn.parallel import DistributedDataParallel

        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            return torch.nn.Module.__call__(module, *args, **kwargs)  # looked up late: the recorder replaces it

        setattr(torch.Tensor, "backward", self._watched(torch.Tensor.backward))  # noqa: B010
        for wrapper in (FullyShardedDataParallel, DistributedDataParallel, FSDPModule):
            setattr(wrapper, "__call__", self._watched(call))  # noqa: B010

    def _watched(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.depth += 1
            try:
                return original(*args, **kwargs)
            except Exception as error:
                if self.depth == 1 and self.reported < MOST:
                    self.reported += 1
                    events.report("raised", error=in_a_line(error), line=script.line_of_stack(sys._getframe()))
                raise
            finally:
                self.depth -= 1

        return watched


def chain(error: BaseException) -> Iterator[str]:
    """An error and its causes, one per line."""
    seen: BaseException | None = error
    while seen is not None:
        yield in_a_line(seen)
        seen = seen.__cause__ or seen.__context__
