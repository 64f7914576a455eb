"""Pickles, read by a machine that makes plain data and nothing else.

A pickle is a program: it names code, calls it, and sets attributes on what it got. Python's own machine can be kept
from names, but not from what it does with the admitted ones. This one knows no attribute, class or function: a name
stands for what the reader admits under it, which is a value, a function written for this purpose, or a kind of `Inert`.
Only these are called, and only `Inert` things take a state.

Time and memory are bounded by the length of the pickle, because each step pays for what it makes, and a call for all
that its arguments hold, as often as it is there: no function takes more than that, whatever it does with them.
"""

import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any

from accel_fsdp.errors import UserError

NEWEST = 5
LONGEST_NUMBER = 64
LONGEST_LINE = 1 << 16
ROOM_PER_BYTE, MOST_ROOM = 36, 1 << 32
"""Bytes of memory that a pickle may take per byte of its length, and at most; honest ones take 30 per byte."""
SLOT, NUMBER, CONTAINER = 8, 40, 100
"""What a value takes, about."""
MOST_IN_KEY = 16
LARGEST_KEY = 1 << 53
"""Larger numbers can be chosen so that their hashes are alike, and looking them up takes forever."""


class Inert:
    """Stands for a class of another library: takes any arguments and any state, and does nothing with them."""

    __slots__ = ("args", "state")

    def __init__(self, *args: Any) -> None:
        self.args, self.state = args, None  # type: tuple[Any, ...], Any


Admitted = Mapping[tuple[str, str], Any]


def _key(value: Any) -> Any:
    """A key of a mapping or member of a set: plain values, and short tuples of them."""
    if isinstance(value, str):
        return value
    left = [value]
    for _ in range(MOST_IN_KEY):
        one = left.pop()
        if isinstance(one, tuple):
            left += one[: MOST_IN_KEY + 1]
        elif isinstance(one, (int, float)) and (one is not value or abs(one) > LARGEST_KEY):  # tuples' hashes can agree
            raise ValueError("an impossible key")
        elif not isinstance(one, (str, bytes, int, float, Inert, type(None))):
            raise TypeError(f"a key of type {type(one).__name__}")
        if not left:
            return value
    raise ValueError("a key of many parts")


def _ordered(pairs: Any = ()) -> "OrderedDict[Any, Any]":
    return OrderedDict((_key(name), value) for name, value in pairs)


def _set(members: Any = ()) -> set[Any]:
    return set(map(_key, members))


def _latin1(text: str, encoding: str = "latin1") -> bytes:
    """How old protocols write bytes: as text, and the call that turns it back."""
    if encoding != "latin1":
        raise ValueError("text in another encoding")
    return text.encode("latin1")


def _no_bytes() -> bytes:
    return b""


def _empty(*factory: Any) -> dict[Any, Any]:
    """A mapping of a class of its own, whose items follow in the pickle."""
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
"""What plain data is made of, in all protocols; and settings that people save beside weights, which are none."""


class Machine:
    """Reads one pickle. Each method named after an opcode does what `pickletools` says of it."""

    def __init__(
        self, content: bytes, admitted: Admitted, path: Path, load: Callable[[Any], Any] | None, spare_room: int
    ) -> None:
        self.content, self.admitted, self.path, self.load = content, admitted, path, load
        self.at = 0
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []
        """The stacks under each mark."""
        self.memo: dict[int, Any] = {}
        self.room = min(spare_room + ROOM_PER_BYTE * len(content), MOST_ROOM)

    def run(self) -> Any:
        content, end = self.content, len(self.content)
        while self.at < end:
            code = content[self.at]
            self.at += 1
            if code == STOP:
                return self.stack.pop()
            step = STEPS.get(code)
            if step is None:
                raise ValueError(f"opcode {bytes([code])!r}, which no checkpoint needs")
            method, argument, cost = step
            self.room -= cost
            if self.room < 0:
                self.pay(0)
            method(self, argument)
        raise EOFError("it ends early")

    def pay(self, size: int) -> None:
        self.room -= size
        if self.room < 0:
            raise ValueError("it takes much more memory than it is long")

    def pay_for(self, value: Any) -> None:
        """Pays for all that a function could do with a value that it is given, as often as a part of it is there."""
        left = [value]
        while left:
            part = left.pop()
            if isinstance(part, (str, bytes)):
                self.pay(len(part))
            elif isinstance(part, (tuple, list, set, dict)):
                self.pay(4 * SLOT * len(part))
                left += part
                if isinstance(part, dict):
                    left += part.values()

    def take(self, count: int) -> bytes:
        found = self.content[self.at : self.at + count]
        if len(found) < count:
            raise EOFError("it counts further than it is long")
        self.at += count
        return found

    def number(self, width: int) -> int:
        if width == 1:  # as most are
            self.at += 1
            return self.content[self.at - 1]
        return int.from_bytes(self.take(width), "little")

    def line(self) -> bytes:
        end = self.content.find(b"\n", self.at, self.at + LONGEST_LINE)
        if end < 0:
            raise EOFError("a line without end")
        found = self.content[self.at : end]
        self.at = end + 1
        return found

    def marked(self) -> list[Any]:
        found, self.stack = self.stack, self.below.pop()
        return found

    def find(self, module: str, name: str) -> Any:
        key = ("builtins" if module == "__builtin__" else module, name)
        for names in (self.admitted, PLAIN):
            if key in names:
                return names[key]
        raise UserError(
            f"{self.path} names {module}.{name}, which no checkpoint needs",
            why="reading it the usual way could run code of whoever wrote the file; nothing was executed",
            fix="if the file is yours, save the weights alone: torch.save(model.state_dict(), FILE); "
            "else don't load it, and get the checkpoint again from where it was written",
        )

    def call(self, made_by: Any, args: Any) -> Any:
        admitted = isinstance(made_by, FunctionType) or (isinstance(made_by, type) and issubclass(made_by, Inert))
        if not admitted or not isinstance(args, tuple):
            raise TypeError("a call of something that can't be called")
        if args:
            self.pay_for(args)
        return made_by(*args)


def _push(machine: Machine, value: Any) -> None:
    machine.stack.append(value)


def _push_new(machine: Machine, kind: Callable[[], Any]) -> None:
    machine.stack.append(kind())


def _push_number(machine: Machine, width: int) -> None:
    machine.stack.append(machine.number(width))


def _push_signed(machine: Machine, width: int) -> None:
    machine.stack.append(int.from_bytes(machine.take(width), "little", signed=True))


def _push_long(machine: Machine, width: int) -> None:
    length = machine.number(width)
    if length > LONGEST_NUMBER:
        raise ValueError(f"a number of {length} bytes")
    _push_signed(machine, length)


def _push_float(machine: Machine, width: int) -> None:
    machine.stack.append(struct.unpack(">d", machine.take(width))[0])


def _push_text(machine: Machine, width: int) -> None:
    machine.stack.append(machine.take(machine.number(width)).decode())


def _push_bytes(machine: Machine, width: int) -> None:
    machine.stack.append(machine.take(machine.number(width)))


def _push_line(machine: Machine, parse: Callable[[bytes], Any]) -> None:
    machine.stack.append(parse(machine.line()))


def _parse_number(line: bytes) -> Any:
    if line in (b"00", b"01"):  # as protocol 0 writes truth
        return line == b"01"
    if len(line) > 3 * LONGEST_NUMBER:
        raise ValueError(f"a number of {len(line)} digits")
    return int(line.removesuffix(b"L"))


def _parse_text(line: bytes) -> str:
    return line.decode("raw-unicode-escape").encode().decode()  # which fails on half of a character


def _mark(machine: Machine, _: None) -> None:
    machine.below.append(machine.stack)
    machine.stack = []


def _pop(machine: Machine, _: None) -> None:
    if machine.stack:
        machine.stack.pop()
    else:
        machine.marked()


def _pop_mark(machine: Machine, _: None) -> None:
    machine.marked()


def _duplicate(machine: Machine, _: None) -> None:
    machine.stack.append(machine.stack[-1])


def _get(machine: Machine, width: int) -> None:
    place = machine.number(width) if width else int(machine.line()[:LONGEST_NUMBER])
    machine.stack.append(machine.memo[place])


def _put(machine: Machine, width: int) -> None:
    place = machine.number(width) if width else int(machine.line()[:LONGEST_NUMBER])
    machine.memo[place] = machine.stack[-1]


def _memoize(machine: Machine, _: None) -> None:
    machine.memo[len(machine.memo)] = machine.stack[-1]


def _protocol(machine: Machine, width: int) -> None:
    if machine.number(width) > NEWEST:
        raise ValueError("a protocol of the future")


def _frame(machine: Machine, width: int) -> None:
    if machine.number(width) > len(machine.content) - machine.at:
        raise EOFError("it counts further than it is long")


def _tuple(machine: Machine, count: int) -> None:
    if len(machine.stack) < count:
        raise IndexError("nothing there")
    machine.stack[-count:] = [tuple(machine.stack[-count:])]


def _marked(machine: Machine, make: Callable[[list[Any]], Any]) -> None:
    made = make(machine.marked())
    machine.stack.append(made)


def _dict_of(items: list[Any]) -> dict[Any, Any]:
    return {_key(name): value for name, value in zip(items[::2], items[1::2], strict=True)}


def _top(machine: Machine, kind: type[Any]) -> Any:
    if not isinstance(machine.stack[-1], kind):
        raise TypeError(f"no {kind.__name__} to put something into")
    return machine.stack[-1]


def _append(machine: Machine, _: None) -> None:
    value = machine.stack.pop()
    _top(machine, list).append(value)


def _extend(machine: Machine, _: None) -> None:
    values = machine.marked()
    _top(machine, list).extend(values)


def _set_item(machine: Machine, _: None) -> None:
    value, name = machine.stack.pop(), _key(machine.stack.pop())
    _top(machine, dict)[name] = value


def _set_items(machine: Machine, _: None) -> None:
    items = machine.marked()
    _top(machine, dict).update(_dict_of(items))


def _add_items(machine: Machine, _: None) -> None:
    members = machine.marked()
    _top(machine, set).update(_set(members))


def _global(machine: Machine, _: None) -> None:
    module, name = machine.line().decode(), machine.line().decode()
    machine.stack.append(machine.find(module, name))


def _stack_global(machine: Machine, _: None) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    if not isinstance(name, str) or not isinstance(module, str):
        raise TypeError("a name that is no text")
    machine.stack.append(machine.find(module, name))


def _call(machine: Machine, _: None) -> None:
    args = machine.stack.pop()
    machine.stack[-1] = machine.call(machine.stack[-1], args)


def _build(machine: Machine, _: None) -> None:
    """Sets a state: of stand-ins alone. What torch notes on ordered mappings (`_metadata`) is no part of them."""
    state = machine.stack.pop()
    if not isinstance(machine.stack[-1], (Inert, OrderedDict)):
        raise TypeError("a state for something that has none")
    if isinstance(machine.stack[-1], Inert):
        machine.stack[-1].state = state


def _persistent(machine: Machine, _: None) -> None:
    if machine.load is None:
        raise ValueError("a storage where none belongs")
    name = machine.stack.pop()
    machine.pay_for(name)
    machine.stack.append(machine.load(name))


STOP = ord(".")
_STEPS: dict[bytes, tuple[Callable[[Machine, Any], None], Any, int]] = {
    **{b"N": (_push, None, SLOT), b"\x88": (_push, True, SLOT), b"\x89": (_push, False, SLOT)},
    **{b"]": (_push_new, list, CONTAINER), b"}": (_push_new, dict, CONTAINER)},
    **{b")": (_push_new, tuple, SLOT), b"\x8f": (_push_new, set, 2 * CONTAINER)},
    **{b"K": (_push_number, 1, SLOT), b"M": (_push_number, 2, NUMBER), b"J": (_push_signed, 4, NUMBER)},
    **{b"\x8a": (_push_long, 1, NUMBER), b"\x8b": (_push_long, 4, NUMBER), b"G": (_push_float, 8, NUMBER)},
    **{b"\x8c": (_push_text, 1, CONTAINER), b"X": (_push_text, 4, CONTAINER), b"\x8d": (_push_text, 8, CONTAINER)},
    **{b"C": (_push_bytes, 1, CONTAINER), b"B": (_push_bytes, 4, CONTAINER), b"\x8e": (_push_bytes, 8, CONTAINER)},
    **{b"I": (_push_line, _parse_number, NUMBER), b"L": (_push_line, _parse_number, NUMBER)},
    **{b"F": (_push_line, float, NUMBER), b"V": (_push_line, _parse_text, CONTAINER)},
    **{b"(": (_mark, None, CONTAINER), b"0": (_pop, None, 0), b"1": (_pop_mark, None, 0)},
    **{b"2": (_duplicate, None, SLOT), b"\x96": (_push_bytes, 8, CONTAINER)},
    **{b"h": (_get, 1, SLOT), b"j": (_get, 4, SLOT), b"g": (_get, 0, SLOT)},
    **{b"q": (_put, 1, CONTAINER), b"r": (_put, 4, CONTAINER), b"p": (_put, 0, CONTAINER)},
    **{b"\x94": (_memoize, None, CONTAINER), b"\x80": (_protocol, 1, 0), b"\x95": (_frame, 8, 0)},
    **{b"\x85": (_tuple, 1, CONTAINER), b"\x86": (_tuple, 2, CONTAINER), b"\x87": (_tuple, 3, CONTAINER)},
    **{b"t": (_marked, tuple, CONTAINER), b"l": (_marked, list, CONTAINER), b"d": (_marked, _dict_of, CONTAINER)},
    **{b"\x91": (_marked, _set, 2 * CONTAINER)},
    **{b"a": (_append, None, SLOT), b"e": (_extend, None, SLOT), b"\x90": (_add_items, None, SLOT)},
    **{b"s": (_set_item, None, CONTAINER), b"u": (_set_items, None, CONTAINER)},
    **{b"c": (_global, None, SLOT), b"\x93": (_stack_global, None, SLOT)},
    **{b"R": (_call, None, CONTAINER), b"\x81": (_call, None, CONTAINER), b"b": (_build, None, SLOT)},
    b"Q": (_persistent, None, CONTAINER),
}
STEPS = {code[0]: step for code, step in _STEPS.items()}
"""What is done for each opcode, with what, and the bytes of memory that it takes. Others are refused: those that make
instances of old classes, names by number from a registry, buffers from elsewhere, and text of Python 2."""
