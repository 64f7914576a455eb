"""Reads untrusted pickles as plain data, in time and memory in proportion to their length, without running code.

A pickle is a program: it names code, calls it, and sets attributes on what it got. This is Python's own reader with
other steps for these opcodes: a name is resolved to what the caller admits under it: a value, a function written for
this purpose, or a subclass of `Inert`. Only these are called, and a state is set on `Inert` objects only.

Time and memory are bounded by the length of the pickle: each step is charged for what it makes, and a call for
everything in its arguments, repeated parts included, because no function needs more than that.
"""

import io
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any

from accel_fsdp.checkpoints.tensor_storage import damaged
from accel_fsdp.errors import UserError

PYTHONS: Any = pickle._Unpickler  # the implementation in Python, whose opcodes can be replaced
LONGEST_NUMBER = 64
"""Bytes."""
ROOM_PER_BYTE, MOST_ROOM = 36, 1 << 32
"""Bytes of memory that a pickle may take per byte of its length, and at most; those of checkpoints take 30 per byte."""
SLOT, NUMBER, CONTAINER = 8, 40, 100
"""The approximate bytes of a value."""
MOST_IN_KEY = 16
LARGEST_KEY = 1 << 53
"""Larger numbers can be chosen so that their hashes are alike, and looking them up takes forever."""
ERRORS = (
    *(EOFError, ValueError, TypeError, LookupError, AttributeError, struct.error, OverflowError, RecursionError),
    *(MemoryError, pickle.UnpicklingError),
)
"""Exceptions of reading damaged bytes, here and in readers that use the result."""
DEEPEST = 100
SPARE_ROOM, SPARE_FOR_ONE_TENSOR = 1 << 22, 1 << 16
"""Bytes of memory that any pickle may take, and one that describes a single tensor, of which there are thousands."""
SPARE_LEAVES, LEAVES_PER_BYTE = 100_000, 4
"""The most values in a pickle, each counted as often as it is referred to; pickles of checkpoints share a few."""
INDEX_LETTERS = 8


class Inert:
    """Replaces a class of another library: accepts any arguments and any state, and ignores them."""

    __slots__ = ("args", "state")

    def __init__(self, *args: Any) -> None:
        self.args, self.state = args, None  # type: tuple[Any, ...], Any


Admitted = Mapping[tuple[str, str], Any]
HOLDERS = (dict, list, tuple, set, Inert)


def _key(value: Any) -> Any:
    """A key of a mapping or member of a set: plain values, and short tuples of them."""
    if isinstance(value, str):
        return value
    remaining = [value]
    for _ in range(MOST_IN_KEY):
        part = remaining.pop()
        if isinstance(part, tuple):
            remaining += part[: MOST_IN_KEY + 1]
        elif isinstance(part, (int, float)) and (
            part is not value or abs(part) > LARGEST_KEY
        ):  # tuples' hashes collide
            raise ValueError("an impossible key")
        elif not isinstance(part, (str, bytes, int, float, Inert, type(None))):
            raise TypeError(f"a key of type {type(part).__name__}")
        if not remaining:
            return value
    raise ValueError("a key of many parts")


def _ordered(pairs: Any = ()) -> "OrderedDict[Any, Any]":
    return OrderedDict((_key(name), value) for name, value in pairs)


def _set(members: Any = ()) -> set[Any]:
    return set(map(_key, members))


def _latin1(text: str, encoding: str = "latin1") -> bytes:
    """Bytes as old protocols write them: as text, with a call that converts it back."""
    if encoding != "latin1":
        raise ValueError("text in another encoding")
    return text.encode("latin1")


def _no_bytes() -> bytes:
    return b""


def _empty(*factory: Any) -> dict[Any, Any]:
    """A mapping of a special class, whose items follow in the pickle."""
    return {}


PLAIN: Admitted = {
    ("collections", "OrderedDict"): _ordered,
    ("builtins", "set"): _set,
    ("builtins", "frozenset"): _set,
    ("_codecs", "encode"): _latin1,
    ("builtins", "bytes"): _no_bytes,
    ("collections", "defaultdict"): _empty,
    ("lightning_fabric.utilities.data", "AttributeDict"): _empty,
    ("lightning.fabric.utilities.data", "AttributeDict"): _empty,
    **{("builtins", name): name for name in ("int", "long", "float", "bool", "str", "list", "dict")},
    **{(f"numpy.{core}.multiarray", "scalar"): Inert for core in ("core", "_core")},
    ("numpy", "dtype"): Inert,
    ("argparse", "Namespace"): Inert,
    ("types", "SimpleNamespace"): Inert,
    **{("datetime", name): Inert for name in ("date", "datetime", "timedelta")},
}
"""Opcodes of plain data in all protocols, and of settings that people save beside weights."""


class Machine(PYTHONS):  # type: ignore[misc]
    """Reads one pickle."""

    def __init__(
        self, content: bytes, admitted: Admitted, path: Path, load: Callable[[Any], Any] | None, spare_room: int
    ) -> None:
        super().__init__(io.BytesIO(content))
        self.admitted, self.path, self.load_storage = admitted, path, load
        self.stack: list[Any] = []
        self.room = min(spare_room + ROOM_PER_BYTE * len(content), MOST_ROOM)

    def charge(self, size: int) -> None:
        """Subtracts these bytes from the memory that the pickle may still use."""
        self.room -= size
        if self.room < 0:
            raise ValueError("it takes much more memory than it is long")

    def charge_for(self, value: Any) -> None:
        """Charges a call for everything in its argument, repeated parts included."""
        remaining = [value]
        while remaining:
            part = remaining.pop()
            if isinstance(part, (str, bytes)):
                self.charge(len(part))
            elif isinstance(part, (tuple, list, set, dict)):
                self.charge(4 * SLOT * len(part))
                remaining += part
                if isinstance(part, dict):
                    remaining += part.values()

    def find_class(self, module: str, name: str) -> Any:
        """Returns the object of an admitted name."""
        key = ("builtins" if module == "__builtin__" else module, name)
        for names in (self.admitted, PLAIN):
            if key in names:
                return names[key]
        raise UserError(
            f"{self.path} names {module}.{name}, which no checkpoint needs",
            why="reading it the usual way could run the code of the file's author; nothing was executed",
            fix="if the file is yours, save only the weights: torch.save(model.state_dict(), FILE); "
            "else don't load it, and get the checkpoint again from where it was written",
        )

    def persistent_load(self, pid: Any) -> Any:
        if self.load_storage is None:
            raise ValueError("a storage where none belongs")
        self.charge_for(pid)
        return self.load_storage(pid)

    def top(self, kind: type[Any]) -> Any:
        """The top of the stack, which must be a container of this kind."""
        if not isinstance(self.stack[-1], kind):
            raise TypeError(f"no {kind.__name__} to put something into")
        return self.stack[-1]


def _call(machine: Machine) -> None:
    args, made_by = machine.stack.pop(), machine.stack[-1]
    admitted = isinstance(made_by, FunctionType) or (isinstance(made_by, type) and issubclass(made_by, Inert))
    if not admitted or not isinstance(args, tuple):
        raise TypeError("a call of something that can't be called")
    machine.charge_for(args)
    machine.stack[-1] = made_by(*args)


def _build(machine: Machine) -> None:
    """Sets the state of an `Inert` object only. torch's `_metadata` on ordered mappings is dropped."""
    state = machine.stack.pop()
    if not isinstance(machine.stack[-1], (Inert, OrderedDict)):
        raise TypeError("a state for an object that takes none")
    if isinstance(machine.stack[-1], Inert):
        machine.stack[-1].state = state


def _dict_of(items: list[Any]) -> dict[Any, Any]:
    return {_key(name): value for name, value in zip(items[::2], items[1::2], strict=True)}


def _set_item(machine: Machine) -> None:
    value, name = machine.stack.pop(), _key(machine.stack.pop())
    machine.top(dict)[name] = value


def _set_items(machine: Machine) -> None:
    items = machine.pop_mark()
    machine.top(dict).update(_dict_of(items))


def _add_items(machine: Machine) -> None:
    members = machine.pop_mark()
    machine.top(set).update(_set(members))


def _push_dict(machine: Machine) -> None:
    mapping = _dict_of(machine.pop_mark())
    machine.stack.append(mapping)


def _push_set(machine: Machine) -> None:
    members = _set(machine.pop_mark())
    machine.stack.append(members)


COSTS = {
    **dict.fromkeys(b"01.\x80\x95", 0),
    **dict.fromkeys(b"N\x88\x89)K2hjgae\x90c\x93b", SLOT),
    **dict.fromkeys(b"MJ\x8a\x8bGILF", NUMBER),
    **dict.fromkeys(b"]}\x8cX\x8dCB\x8e\x96V(qrp\x94\x85\x86\x87tldsuR\x81Q", CONTAINER),
    **dict.fromkeys(b"\x8f\x91", 2 * CONTAINER),
}
"""The bytes of memory that each opcode takes. Others are refused: those that make instances of old classes, names by
number from a registry, buffers from elsewhere, and text of Python 2."""
CHECKED = b"IL\x8a\x8bVX\x8c\x8d"
"""Opcodes whose numbers may be too long, and whose text may hold half a character."""
OWN: dict[int, Callable[[Machine], None]] = {
    **{ord("R"): _call, 0x81: _call, ord("b"): _build, ord("d"): _push_dict, 0x91: _push_set},
    **{ord("s"): _set_item, ord("u"): _set_items, 0x90: _add_items},
    0x96: PYTHONS.load_binbytes8,  # Python allocates a bytearray of the declared size before it reads
}
"""The steps that are not Python's."""


def _check_limits(value: Any) -> None:
    if isinstance(value, str):
        value.encode()
    elif value.bit_length() > 8 * LONGEST_NUMBER:
        raise ValueError("a number of many digits")


def _charging_step(code: int, cost: int) -> Callable[[Machine], None]:
    step, is_checked = OWN.get(code) or PYTHONS.dispatch[code], code in CHECKED

    def charge_and_step(machine: Machine) -> None:
        machine.room -= cost
        if machine.room < 0:
            machine.charge(0)
        step(machine)
        if is_checked:
            _check_limits(machine.stack[-1])

    return charge_and_step


Machine.dispatch = {code: _charging_step(code, cost) for code, cost in COSTS.items()}


def unpickle(
    content: bytes,
    admitted: Admitted,
    path: Path,
    load: Callable[[Any], Any] | None = None,
    spare_room: int = SPARE_ROOM,
) -> Any:
    """The object in a pickle of admitted names; `load` resolves persistent ids, such as storages.

    The object is a tree: no container holds itself, and walking it, or listing the path of each leaf, takes time and
    memory in proportion to the pickle's length.
    """
    try:
        content_read = Machine(content, admitted, path, load, spare_room).load()
        _, leaves, letters = _unfolded_size([content_read], {}, 0)
        limit = SPARE_LEAVES + LEAVES_PER_BYTE * len(content)
        if leaves > limit or letters > limit * ROOM_PER_BYTE:
            raise ValueError("its parts are referred to more often than in any checkpoint")
    except ERRORS as error:
        detail = f" ({str(error)[:100]})" if str(error) else ""
        raise damaged(path, f"is damaged: {type(error).__name__} in its pickle{detail}") from error
    return content_read


def _unfolded_size(holder: Any, sizes: dict[int, tuple[int, ...]], depth: int) -> tuple[int, ...]:
    """The height of a container, its leaves, and the letters of all paths, with shared parts counted each time.

    `sizes` has the counted containers, and an empty tuple for those around this one.
    """
    if counted := sizes.get(id(holder)):
        return counted
    if counted is not None or depth > DEEPEST:
        raise ValueError("it holds itself, or is nested deeper than any checkpoint")
    sizes[id(holder)] = ()
    height, leaves, letters = 1, 1, 0
    for name_letters, part in _inner_parts(holder):
        if isinstance(part, HOLDERS):
            part_height, count, size = _unfolded_size(part, sizes, depth + 1)
        else:
            part_height, count, size = 0, 1, len(part) if isinstance(part, (str, bytes)) else 0
        height, leaves, letters = max(height, part_height + 1), leaves + count, letters + size + name_letters * count
    if height > DEEPEST:
        raise ValueError("it is nested deeper than any checkpoint")
    sizes[id(holder)] = height, leaves, letters
    return height, leaves, letters


def _inner_parts(value: Any) -> Iterator[tuple[int, Any]]:
    """The parts of a container, each with the number of letters that it adds to the paths of its leaves."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield 0, name
            yield len(name) if isinstance(name, str) else INDEX_LETTERS, part
        return
    parts = (*value.args, value.state) if isinstance(value, Inert) else value
    for part in parts:
        yield INDEX_LETTERS, part
