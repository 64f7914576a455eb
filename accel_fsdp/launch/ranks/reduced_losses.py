"""Observes losses that a script sums over ranks before backward: a rank's gradient is then that of its own part."""

import math
import sys
from typing import TYPE_CHECKING, Any

from accel_fsdp.launch.ranks import accumulation, events, script
from accel_fsdp.launch.ranks.observing import Observation, after
from accel_fsdp.launch.ranks.ratios import EXACT
from accel_fsdp.launch.ranks.summed_counts import SummedCounts
from accel_fsdp.library_internals import Internal

if TYPE_CHECKING:
    import torch

REDUCTIONS = Observation(
    "losses that are summed over ranks", (Internal("torch.distributed:all_reduce", "tensor op *"),)
)


class ObservedReductions:
    """Compares the derivative of a backward pass by a sum over ranks with the one that a mean needs.

    FSDP and DDP average gradients over ranks, so the mean of a sum over ranks needs the derivative 1, and the mean per
    token needs the ranks divided by all tokens. A loss divided by the ranks, or by all tokens, is divided twice.
    """

    def __init__(self) -> None:
        self.counts = SummedCounts()
        self.is_reported = False

    def install(self) -> None:
        import torch

        self.counts.install()
        after(torch.distributed, "all_reduce", self._observe)

    def _observe(
        self, tensor: "torch.Tensor", op: Any = None, group: Any = None, async_op: bool = False, **_: Any
    ) -> None:
        import torch

        sums, averages = torch.distributed.ReduceOp.SUM, torch.distributed.ReduceOp.AVG
        if self.is_reported or async_op or not isinstance(tensor, torch.Tensor) or tensor.numel() != 1:
            return
        if op is not None and op not in (sums, averages):
            return
        if tensor.grad_fn is not None and torch.is_grad_enabled():
            line = script.line_of_stack(sys._getframe(2))
            tensor.register_hook(  # type: ignore[no-untyped-call]
                lambda derivative: self._compare(float(derivative), line)
            )

    def _compare(self, derivative: float, line: str) -> None:
        whole = derivative * accumulation.batches()
        ranks = self.counts.ranks
        divisors = [ranks, *(number for number in self.counts.numbers if number > 1)]
        if line and ranks > 1 and any(math.isclose(whole * number, 1, rel_tol=EXACT) for number in divisors):
            self.is_reported = True
            events.report("reduced-loss", ranks=ranks, line=line)
