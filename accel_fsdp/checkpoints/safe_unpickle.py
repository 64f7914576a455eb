"""Untrusted pickles as plain data, in time and memory in proportion to their length; nothing is executed."""

import pickle
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from accel_fsdp.checkpoints.pickle_opcodes import ROOM_PER_BYTE, Admitted, Inert, Machine
from accel_fsdp.checkpoints.tensor_storage import damaged

ERRORS = (
    *(EOFError, ValueError, TypeError, LookupError, AttributeError, struct.error, OverflowError, RecursionError),
    *(MemoryError, pickle.UnpicklingError),
)
"""Exceptions of reading damaged bytes, here and in readers that use the result."""
DEEPEST = 100
SPARE_ROOM, SPARE_FOR_ONE_TENSOR = 1 << 22, 1 << 16
"""Bytes of memory that any pickle may take, and one that describes a single tensor, of which there are thousands."""
SPARE_LEAVES, LEAVES_PER_BYTE = 100_000, 4
"""The most values in a pickle, each counted as often as it is referred to; honest pickles share a few."""
INDEX_LETTERS = 8
HOLDERS = (dict, list, tuple, set, Inert)


def unpickle(
    content: bytes,
    admitted: Admitted,
    path: Path,
    load: Callable[[Any], Any] | None = None,
    spare_room: int = SPARE_ROOM,
) -> Any:
    """The object in a pickle of admitted names; `load` resolves persistent ids, such as storages.

    The object is a tree: nothing in it holds itself, and walking it, or listing the path of each leaf, takes time and
    memory in proportion to the pickle's length.
    """
    try:
        content_read = Machine(content, admitted, path, load, spare_room).load()
        _, leaves, letters = _unfolded([content_read], {}, 0)
        most = SPARE_LEAVES + LEAVES_PER_BYTE * len(content)
        if leaves > most or letters > most * ROOM_PER_BYTE:
            raise ValueError("its parts are referred to more often than in any checkpoint")
    except ERRORS as error:
        detail = f" ({str(error)[:100]})" if str(error) else ""
        raise damaged(path, f"is damaged: {type(error).__name__} in its pickle{detail}") from error
    return content_read


def _unfolded(holder: Any, sizes: dict[int, tuple[int, ...]], depth: int) -> tuple[int, ...]:
    """The height of a container, its leaves, and the letters of all paths, with shared parts counted each time.

    `sizes` has the counted containers, and an empty tuple for those around this one.
    """
    if counted := sizes.get(id(holder)):
        return counted
    if counted is not None or depth > DEEPEST:
        raise ValueError("it holds itself, or is nested deeper than any checkpoint")
    sizes[id(holder)] = ()
    height, leaves, letters = 1, 1, 0
    for name_letters, part in _inner(holder):
        if isinstance(part, HOLDERS):
            below, inside, text = _unfolded(part, sizes, depth + 1)
        else:
            below, inside, text = 0, 1, len(part) if isinstance(part, (str, bytes)) else 0
        height, leaves, letters = max(height, below + 1), leaves + inside, letters + text + name_letters * inside
    if height > DEEPEST:
        raise ValueError("it is nested deeper than any checkpoint")
    sizes[id(holder)] = height, leaves, letters
    return height, leaves, letters


def _inner(value: Any) -> Iterator[tuple[int, Any]]:
    """The parts of a container, each with the number of letters that it adds to the paths of its leaves."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield 0, name
            yield len(name) if isinstance(name, str) else INDEX_LETTERS, part
        return
    parts = (*value.args, value.state) if isinstance(value, Inert) else value
    for part in parts:
        yield INDEX_LETTERS, part
