"""Pickles of strangers as plain data, in time and memory in proportion to their length; nothing is executed."""

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from accel_fsdp.checkpoints.pickle_opcodes import Admitted, Inert, Machine
from accel_fsdp.checkpoints.tensor_storage import damaged

ERRORS = (
    *(EOFError, ValueError, TypeError, LookupError, AttributeError, struct.error, OverflowError, RecursionError),
    MemoryError,
)
"""How reading fails on damaged bytes, here and in what readers make of the result."""
DEEPEST = 100
SPARE_VALUES, VALUES_PER_BYTE = 1_000_000, 4
"""How many values a pickle may hold, each counted as often as it is referred to; honest ones share a few."""
HOLDERS = (dict, list, tuple, set, Inert)


def unpickle(content: bytes, admitted: Admitted, path: Path, load: Callable[[Any], Any] | None = None) -> Any:
    """The object in a pickle of admitted names; `load` makes what it calls persistent, such as storages.

    It is a tree: nothing in it holds itself, and to walk it takes time and depth in proportion to the pickle's length.

    Raises:
        UserError: the pickle names something else, or is damaged.
    """
    try:
        found = Machine(content, admitted, path, load).run()
        _check_tree(found, SPARE_VALUES + VALUES_PER_BYTE * len(content))
    except ERRORS as error:
        raise damaged(path, f"is damaged: {type(error).__name__} in its pickle ({str(error)[:100]})") from error
    return found


def _check_tree(value: Any, most: int) -> None:
    """Refuses what holds itself, is nested deep, or is referred to so often that no walk through it would end."""
    counts: dict[int, int] = {}
    path = [(id(value), _inner(value), 1)]
    around = {id(value)}
    while path:
        holder, rest, count = path.pop()
        for one in rest:
            if not isinstance(one, HOLDERS):
                count += 1
            elif id(one) in around:
                raise ValueError("something holds itself")
            elif id(one) in counts:
                count += counts[id(one)]
            else:
                path += [(holder, rest, count), (id(one), _inner(one), 1)]
                around.add(id(one))
                break
        else:
            counts[holder] = count
            around.remove(holder)
            if path:
                outer, others, before = path.pop()
                path.append((outer, others, before + count))
        if len(path) > DEEPEST or count > most:
            raise ValueError("nested deeper, or referred to more often, than in any checkpoint")


def _inner(value: Any) -> Iterator[Any]:
    if isinstance(value, Inert):
        return iter((*value.args, value.state))
    if isinstance(value, dict):
        return (one for pair in value.items() for one in pair)
    return iter(value) if isinstance(value, (list, tuple, set)) else iter(())
