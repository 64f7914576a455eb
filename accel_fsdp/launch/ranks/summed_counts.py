"""Observes numbers that a script sums over ranks, such as its tokens, and losses that it sums or divides by them.

A sum over a rank's tokens, divided by those of all ranks, needs the factor of the ranks, as gradients are averaged. The
gradient of a loss that is summed over ranks before backward is that of the rank's own part.
"""

import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from accel_fsdp.launch.ranks import accumulation, events, script
from accel_fsdp.launch.ranks.observing import Observation, after
from accel_fsdp.launch.ranks.ratios import EXACT
from accel_fsdp.launch_environment import LaunchEnvironment
from accel_fsdp.library_internals import Internal

if TYPE_CHECKING:
    import torch


COUNTS = Observation(
    "counts that are summed over ranks",
    Internal("torch.distributed:all_reduce", "tensor op *"),
    Internal("torch.distributed:all_gather", "tensor_list tensor *"),
    Internal("torch.distributed:all_gather_into_tensor", "output_tensor input_tensor *"),
)
REDUCTIONS = Observation("losses that are summed over ranks", Internal("torch.distributed:all_reduce", "tensor op *"))
MOST_NUMBERS = 100
SUM = 2
"""How the saved settings of torch's losses name a sum."""


class SummedCounts:
    """`numbers` are the newest sums over all ranks; `ranks` is the number of those with different rows."""

    def __init__(self) -> None:
        launch = LaunchEnvironment.now()
        self.world_size = launch.world_size
        self.ranks = len(launch.with_rows(range(launch.world_size)))
        self.numbers: list[float] = []

    def install(self) -> None:
        import torch.distributed as dist

        after(dist, "all_reduce", self._record_reduced)
        after(dist, "all_gather", self._record_gathered)
        after(dist, "all_gather_into_tensor", self._record_gathered)

    def _record_reduced(self, tensor: Any, op: Any = None, group: Any = None, async_op: bool = False, **_: Any) -> None:
        import torch.distributed as dist

        is_average = op == dist.ReduceOp.AVG
        if not async_op and is_number(tensor) and (op is None or is_average or op == dist.ReduceOp.SUM):
            self._record(float(tensor) * (self.ranks if is_average else 1))

    def _record_gathered(self, *args: Any, **options: Any) -> None:
        parts: Any = args[0] if args else options.get("tensor_list", options.get("output_tensor"))
        is_of_all = not options.get("async_op") and len(parts) == self.world_size
        if is_of_all and all(map(is_number, parts)):
            self._record(sum(float(part) for part in parts))

    def _record(self, number: float) -> None:
        self.numbers = [number, *self.numbers[: MOST_NUMBERS - 1]]

    def watch(self, roots: "Iterable[torch.Tensor]") -> "Sums":
        """Returns the sums of a loss, whose derivatives the backward pass fills in."""
        sums = Sums()
        for node in sums_below(roots):
            sums.numbers += _numbers_of(node)
            node.register_prehook(lambda gradients: sums.derivatives.extend(map(float, gradients)))
        return sums

    def lacks_ranks(self, sums: "Sums", is_only: bool) -> bool:
        """Whether a sum's derivative is 1 divided by a count of all ranks, alone or also by the micro-batches.

        A micro-batch's count is as many times smaller than the step's as the step has micro-batches: with as many
        ranks, the right derivative is 1 divided by it. So it says something only if `is_only` one is in the step.
        """
        counts = [number for number in self.numbers if number > 1 and number != self.ranks]
        of_steps = [number for number in counts if is_only or number > self.ranks * sums.numbers]
        batches = accumulation.batches()
        products = [d * count for d in sums.derivatives for count in of_steps]
        if batches > 1:
            products += [d * batches * count for d in sums.derivatives for count in counts]
        is_known = 1 < self.ranks == self.world_size
        return is_known and any(math.isclose(product, 1, rel_tol=EXACT) for product in products)


@dataclass
class Sums:
    """The sums of many numbers in a loss: how many numbers they have, and the loss's derivatives by the sums."""

    numbers: int = 0
    derivatives: list[float] = field(default_factory=list)


def is_number(value: Any) -> bool:
    """Whether a value is a tensor with a single number that has no gradient."""
    import torch

    return isinstance(value, torch.Tensor) and value.numel() == 1 and not value.requires_grad


def sums_below(roots: "Iterable[torch.Tensor]") -> Iterator[Any]:
    """The nodes of a loss that make one number of many by a sum."""
    nodes = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen: dict[int, Any] = {}
    while nodes:
        node = nodes.pop()
        if id(node) in seen:
            continue
        seen[id(node)] = node
        inner_nodes = [inner for inner, _ in node.next_functions if inner is not None]
        if all(map(_gives_number, inner_nodes)):
            nodes += inner_nodes
        elif node.name().startswith("SumBackward") or getattr(node, "_saved_reduction", None) == SUM:
            yield node


def _numbers_of(sum_node: Any) -> int:
    """How many numbers a sum has, without ignored targets."""
    targets = getattr(sum_node, "_saved_target", None)
    if targets is None:
        return math.prod(getattr(sum_node, "_saved_self_sym_sizes", (0,)))
    return int((targets != getattr(sum_node, "_saved_ignore_index", None)).sum())


def _gives_number(node: Any) -> bool:
    shapes = [metadata.shape for metadata in getattr(node, "_input_metadata", ())]  # of what it gives in forward
    return bool(shapes) and all(math.prod(shape) == 1 for shape in shapes)


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
