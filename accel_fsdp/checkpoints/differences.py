"""Compares the tensors of two checkpoints of any kind, block by block: what changed, and by how much."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from accel_fsdp.checkpoints.tensor_storage import ITEM_BYTES, TORCH_NAMES, FileReader, Stored, part_of

if TYPE_CHECKING:
    import torch

BLOCK_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class Difference:
    """How a tensor of one checkpoint differs from that of the other.

    `share` of the elements changed, by at most `largest`; `relative` is the norm of the change, as a part of the
    tensor's norm before, and None if that is 0. `why` says that a checkpoint lacks the tensor, or has it in
    another shape or dtype or with NaN; most numbers are None then. NaN in both are equal.
    """

    name: str
    share: float | None = None
    largest: float | None = None
    relative: float | None = None
    why: str = ""

    @property
    def is_equal(self) -> bool:
        return self.share == 0

    @property
    def rank(self) -> float:
        """Orders differences, the largest first."""
        return -math.inf if self.relative is None else -self.relative


def total_bytes(first: Mapping[str, Stored], second: Mapping[str, Stored]) -> int:
    """The bytes that `differences` passes over."""
    return sum(math.prod(stored.shape) * ITEM_BYTES[stored.dtype] for name, stored in first.items() if name in second)


def differences(
    first: Mapping[str, Stored], second: Mapping[str, Stored], reader: FileReader, progress: Callable[[int], None]
) -> Iterator[Difference]:
    """The difference of each tensor, in the order of the first checkpoint, then what it lacks.

    `progress` is called with each number of bytes of the first one. Memory holds one block of each.
    """
    for name, before in first.items():
        after = second.get(name)
        if after is None:
            yield Difference(name, why="is only in the first")
        elif before.shape != after.shape:
            yield Difference(name, why=f"has the shape {list(before.shape)}, then {list(after.shape)}")
        elif before.dtype != after.dtype:
            yield Difference(name, why=f"is {TORCH_NAMES[before.dtype]}, then {TORCH_NAMES[after.dtype]}")
        else:
            yield _compared(name, before, after, reader, progress)
    for name in second.keys() - first.keys():
        yield Difference(name, why="is only in the second")


def _compared(
    name: str, before: Stored, after: Stored, reader: FileReader, progress: Callable[[int], None]
) -> Difference:
    elements, item = math.prod(before.shape), ITEM_BYTES[before.dtype]
    if not elements or before.content == after.content:
        progress(elements * item)
        return Difference(name, 0.0, 0.0, 0.0)
    unit = math.lcm(before.unit, after.unit)
    step = max(1, BLOCK_ELEMENTS // unit) * unit
    changed, largest, moved, length = 0, 0.0, 0.0, 0.0
    for start in range(0, elements, step):
        stop = min(start + step, elements)
        old, new = (_numbers(stored, reader, start, stop) for stored in (before, after))
        differs = (old != new) & ~(old.isnan() & new.isnan())
        change = (new - old)[differs].abs()
        changed += change.numel()
        largest = max(largest, float(change.max())) if change.numel() else largest
        moved, length = moved + float(change.square().sum()), length + float(old.square().sum())
        progress((stop - start) * item)
    if not math.isfinite(moved):
        return Difference(name, changed / elements, why="has NaN or infinite numbers in one of the two alone")
    relative = math.sqrt(moved / length) if length else None if moved else 0.0
    return Difference(name, changed / elements, largest, relative)


def _numbers(stored: Stored, reader: FileReader, start: int, stop: int) -> "torch.Tensor":
    import torch

    content = part_of(reader, stored, start, stop)
    return torch.frombuffer(content, dtype=getattr(torch, TORCH_NAMES[stored.dtype])).double()
