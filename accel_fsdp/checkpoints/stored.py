"""A tensor in a checkpoint, whoever wrote it: shape, dtype, and how it is loaded. Nothing is read before `load()`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from accel_fsdp.checkpoints.safetensors_header import DTYPES, TORCH_NAMES
from accel_fsdp.errors import UserError
from accel_fsdp.untrusted_files import broken

Shapes = Mapping[str, tuple[int, ...]]
RENEWED_BYTES = 1 << 28
"""A mapped file is mapped again after so many bytes, because pages that were read count as this process's memory."""


@dataclass(frozen=True, eq=False)
class Stored:
    """`load` reads the tensor. `parts`, if any, are the same elements in C order."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[], torch.Tensor]
    parts: Sequence["Stored"] = ()

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Box:
    """A part of a tensor, beginning at `offsets`; `path` is its file."""

    path: Path
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    load: Callable[[], torch.Tensor]


class Mapped:
    """Something opened that maps a file into memory, and that is opened again after RENEWED_BYTES; not for threads."""

    def __init__(self, open: Callable[[], Any]) -> None:
        self._open, self._held, self._bytes = open, None, 0  # type: Callable[[], Any], Any, int

    def get(self, size_bytes: int = 0) -> Any:
        """What was opened, of which `size_bytes` will be read."""
        if self._held is None or self._bytes > RENEWED_BYTES:
            self._held, self._bytes = None, 0
            self._held = self._open()
        self._bytes += size_bytes
        return self._held


def short_name(dtype: torch.dtype, where: object = "a tensor") -> str:
    """The name of a dtype in safetensors' headers.

    Raises:
        UserError: it has none.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise UserError(
            f"{where} holds a tensor of {name}",
            why="safetensors has no such numbers",
            fix="convert it with torch, save the checkpoint again, and export that",
        )
    return DTYPES[name]


def torch_dtype(short: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, TORCH_NAMES[short])
    return dtype


def same_bytes(first: Stored, second: Stored) -> bool:
    """Whether two tensors hold the same bytes."""
    if first is second or (first.shape, first.dtype) != (second.shape, second.dtype):
        return first is second
    return torch.equal(flat(first.load()).view(torch.uint8), flat(second.load()).view(torch.uint8))


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's elements in C order; a tensor that is marked as negative or conjugate is resolved."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)


def assembled(name: str, shape: tuple[int, ...], dtype: torch.dtype, boxes: Sequence[Box]) -> Stored:
    """A tensor of boxes, which must fill it: all inside, without overlaps, and with sizes that add up to it."""
    elements = sum(prod(box.sizes) for box in boxes)
    path = boxes[0].path if boxes else Path(name)
    if elements != prod(shape) or any(len(box.offsets) != len(shape) for box in boxes):
        raise broken(path, f"and its siblings hold {elements} of the {prod(shape)} elements of {name}")
    if not _fill_exactly(shape, boxes):
        raise broken(path, f"and its siblings hold some elements of {name} twice, others never")

    def checked(box: Box) -> torch.Tensor:
        part = box.load()
        if part.dtype != dtype or tuple(part.shape) != box.sizes:
            raise broken(box.path, f"differs from the description of {name}")
        return part

    def load() -> torch.Tensor:
        if len(boxes) == 1:
            return checked(boxes[0])
        whole = torch.empty(shape, dtype=dtype)
        for box in boxes:
            place = tuple(slice(low, low + size) for low, size in zip(box.offsets, box.sizes, strict=True))
            whole[place] = checked(box)
        return whole

    is_stacked = all(box.sizes[1:] == shape[1:] for box in boxes)
    ordered = sorted(boxes, key=lambda box: box.offsets) if is_stacked else ()
    return Stored(shape, dtype, load, [Stored(box.sizes, dtype, partial(checked, box)) for box in ordered])


def _fill_exactly(shape: tuple[int, ...], boxes: Sequence[Box]) -> bool:
    """Whether boxes cover each element once: counted in the cells into which the ends of all boxes cut the tensor."""
    spans = [[(low, low + size) for low, size in zip(box.offsets, box.sizes, strict=True)] for box in boxes]
    ends = [sorted({0, size}.union(*(span[dim] for span in spans))) for dim, size in enumerate(shape)]
    counts = torch.zeros([len(of_dim) - 1 for of_dim in ends], dtype=torch.int32)
    for span in spans:
        counts[tuple(slice(*map(of_dim.index, cut)) for of_dim, cut in zip(ends, span, strict=True))] += 1
    return bool((counts == 1).all())
