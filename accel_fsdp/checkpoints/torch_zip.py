"""Reads files that `torch.save` wrote, without torch: the location of each tensor's bytes.

No code that they name is executed.

Such a file is a zip archive of stored records: a pickle that describes the object, and one record per storage. The
unpickler admits only the names that tensors need; each is resolved to code of this module, so that not even an admitted
pickle reaches torch.
"""

import struct
import zlib
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from accel_fsdp.checkpoints.safe_unpickle import SPARE_ROOM, Admitted, unpickle
from accel_fsdp.checkpoints.tensor_storage import (
    ITEM_BYTES,
    TORCH_NAMES,
    FileReader,
    FileRecord,
    Piece,
    Stored,
    c_order,
    damaged,
    tensor,
)
from accel_fsdp.errors import UserError

TENSOR, PARAMETER = "Tensor", "Parameter"
DTYPES = {name: short for short, name in TORCH_NAMES.items()}
"""torch's names and safetensors'."""
STORAGES = {
    **{"DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16"},
    **{"LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8"},
    **{"BoolStorage": "BOOL", "UntypedStorage": "U8", "ComplexFloatStorage": "C64"},
}
NAMELESS = {
    **{"ComplexDoubleStorage": "complex128", "QInt8Storage": "qint8", "QUInt8Storage": "quint8"},
    **{"QInt32Storage": "qint32", "QUInt4x2Storage": "quint4x2", "QUInt2x4Storage": "quint2x4"},
}
"""Storages of dtypes for which safetensors has no name."""
NAMELESS_DTYPES = (
    *NAMELESS.values(),
    *("complex32", "float4_e2m1fn_x2", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"),
    *(f"{kind}{bits}" for kind in ("int", "uint") for bits in range(1, 8)),
)
END, END64, ENTRY, LOCAL = b"PK\x05\x06", b"PK\x06\x06", b"PK\x01\x02", b"PK\x03\x04"
ENTRY_FIELDS = struct.Struct("<4s6xH4xIIIHHH8xI")
CRC_AT = 16
"""Fields of an entry in the list of records."""
LOCAL_FIELDS = struct.Struct("<4s22xHH")
HEAD_BYTES, TAIL_BYTES = 4096, 1024
LARGEST_DIRECTORY = 1 << 28
LONGEST_KEY = 255
"""Letters in the name of a storage, which torch numbers."""
MOST_DIMENSIONS, LARGEST_SIZE = 64, 1 << 62
"""torch's own limits."""


class Slot(NamedTuple):
    """One record of an archive: checksum, size, and where its local header and its entry in the list of records begin.

    Places count from the archive's start.
    """

    crc: int
    size: int
    header: int
    entry: int


@dataclass(frozen=True)
class Storage:
    """A storage: the dtype that its class gives, and its record."""

    dtype: str
    record: FileRecord


@dataclass(frozen=True)
class View:
    """A tensor as the pickle describes it: a view of a storage."""

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def piece(self, offsets: tuple[int, ...]) -> Piece:
        item = ITEM_BYTES[self.dtype]
        needed = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        if prod(self.shape) and (self.offset + needed) * item > self.storage.record.length:
            raise damaged(self.storage.record.path, "has a tensor that is larger than its storage")
        in_order = zip(self.shape, self.strides, c_order(self.shape), strict=True)
        plain = prod(self.shape) == 0 or all(size == 1 or stride == usual for size, stride, usual in in_order)
        skip = self.offset * item
        return Piece(self.storage.record, offsets, self.shape, skip, None if plain else self.strides)

    def stored(self, name: str) -> Stored:
        return tensor(name, self.dtype, self.shape, [self.piece((0,) * len(self.shape))])


def size(numbers: Any) -> tuple[int, ...]:
    """Sizes of a tensor, or its strides; raises ValueError for impossible ones."""
    dimensions = tuple(numbers)
    if len(dimensions) > MOST_DIMENSIONS or not all(type(n) is int and 0 <= n < LARGEST_SIZE for n in dimensions):
        raise ValueError("a tensor of impossible shape")
    return dimensions


def _nameless(path: Path, dtype: str) -> UserError:
    return UserError(
        f"{path} holds a tensor of {dtype}",
        why="safetensors has no such numbers",
        fix="convert it with torch, save the checkpoint again, and export that",
    )


def _view(
    storage: Any,
    offset: Any,
    shape: Any,
    strides: Any,
    grad: Any = False,
    hooks: Any = None,
    metadata: Any = None,
    *,
    dtype: Any = None,
) -> View:
    sizes, steps, (first,) = size(shape), size(strides), size((offset,))
    kind = storage.dtype if dtype is None else dtype
    if kind in NAMELESS_DTYPES:
        raise _nameless(storage.record.path, kind)
    if not isinstance(storage, Storage) or kind not in ITEM_BYTES or len(sizes) != len(steps):
        raise ValueError("no tensor")
    if metadata:
        marks = ", ".join(map(str, metadata)) if isinstance(metadata, dict) else "unknown ones"
        raise UserError(
            f"{storage.record.path} holds a tensor with flags that change its values: {marks}",
            why="they make torch read other values than the stored ones, such as their negatives",
            fix="in torch: tensor.resolve_conj().resolve_neg(), save the checkpoint again, and export that",
        )
    return View(storage, kind, first, sizes, steps)


def _typed_view(
    storage: Any, offset: Any, shape: Any, strides: Any, grad: Any, hooks: Any, dtype: Any, metadata: Any = None
) -> View:
    return _view(storage, offset, shape, strides, metadata=metadata, dtype=dtype)


def _parameter(data: Any, *_others: Any) -> View:
    if not isinstance(data, View):
        raise TypeError("a parameter without a tensor")
    return data


def _with_attributes(rebuild: Any, kind: Any, args: Any, attributes: Any) -> View:
    """A tensor with attributes, as FSDP1 saves it in full state dicts (`_has_been_cloned`)."""
    if rebuild not in (_view, _typed_view, _parameter) or kind not in (TENSOR, PARAMETER):
        raise ValueError("not a plain tensor")
    view: View = rebuild(*args)
    return view


TENSORS: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): _view,
    ("torch._utils", "_rebuild_tensor_v3"): _typed_view,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): _with_attributes,
    ("torch", "Tensor"): TENSOR,
    ("torch.nn.parameter", "Parameter"): PARAMETER,
    ("torch", "Size"): size,
    **{("torch", name): short for name, short in DTYPES.items()},
    **{("torch", name): name for name in (*STORAGES, *NAMELESS, *NAMELESS_DTYPES)},
    ("torch.storage", "UntypedStorage"): "UntypedStorage",
}
"""The names that pickles of tensors use."""


class Archive:
    """A zip archive of stored records, in bytes `start` to `start + length` of a file.

    Both ends of the archive, which hold everything but the tensors, are read at once: a checkpoint of many ranks has an
    archive per chunk, ten thousand of them.
    """

    def __init__(self, reader: FileReader, path: Path, start: int, length: int) -> None:
        self.reader, self.path, self.start, self.length = reader, path, start, length
        self.head = reader.bytes_of(path, start, min(length, HEAD_BYTES))
        try:
            self.slots = self._slots()
        except (struct.error, ValueError, UnicodeDecodeError) as error:
            raise damaged(path, f"is damaged: no archive in bytes {start} to {start + length}") from error
        self.has_checksums = any(slot.crc for slot in self.slots.values())
        """`torch.serialization.set_crc32_options(False)` leaves them out."""

    def _slots(self) -> dict[str, Slot]:
        tail_at = max(0, self.length - TAIL_BYTES)
        tail = self._bytes(tail_at, self.length - tail_at)
        size, offset = _directory(tail)
        if size > min(self.length, LARGEST_DIRECTORY) or offset + size > self.length:
            raise ValueError("directory outside of the archive")
        shift = offset - tail_at
        content = tail[shift : shift + size] if shift >= 0 else self._bytes(offset, size)
        return _entries(content, offset)

    def _bytes(self, at: int, count: int) -> bytes:
        if at + count <= len(self.head):
            return self.head[at : at + count]
        return self.reader.bytes_of(self.path, self.start + at, count)

    def record(self, name: str) -> FileRecord:
        """The location of a record's bytes, behind its local header."""
        if name not in self.slots:
            raise damaged(self.path, f"is damaged: {name} is missing")
        slot = self.slots[name]
        head = self._bytes(slot.header, LOCAL_FIELDS.size)
        if head[:4] != LOCAL or len(head) < LOCAL_FIELDS.size:
            raise damaged(self.path, f"is damaged: no record at byte {self.start + slot.header}")
        begin = slot.header + LOCAL_FIELDS.size + sum(LOCAL_FIELDS.unpack(head)[1:])
        if begin + slot.size > self.length:
            raise damaged(self.path, "has a record that extends past its end")
        return FileRecord(self.path, self.start + begin, slot.size, slot.crc if self.has_checksums else None)

    def content_of(self, name: str) -> bytes:
        place = self.record(name)
        if place.length > LARGEST_DIRECTORY:
            raise damaged(self.path, f"is damaged: {name} is too large")
        content = self._bytes(place.start - self.start, place.length)
        if len(content) < place.length or place.crc not in (None, zlib.crc32(content)):
            raise damaged(self.path, f"is damaged: the checksum of {name} is wrong")
        return content

    def load(self, admitted: Admitted, spare_room: int = SPARE_ROOM) -> Any:
        """The pickled object, with a `View` for each tensor; `spare_room` as for `unpickle`."""
        if "byteorder" in self.slots and self.content_of("byteorder") != b"little":
            raise damaged(self.path, "was written on a machine of the other byte order")
        return unpickle(self.content_of("data.pkl"), admitted, self.path, self._storage, spare_room)

    def _storage(self, pid: Any) -> Storage:
        kind, storage, key, _, count = pid
        is_named = isinstance(storage, str) and isinstance(key, str) and len(key) <= LONGEST_KEY
        if kind != "storage" or not is_named or type(count) is not int:
            raise ValueError("no storage")
        if storage in NAMELESS:
            raise _nameless(self.path, NAMELESS[storage])
        dtype = STORAGES[storage]
        place = self.record(f"data/{key}")
        if place.length != count * ITEM_BYTES[dtype]:
            raise damaged(self.path, f"is damaged: storage {key} has another size than its tensors")
        return Storage(dtype, place)


def _directory(tail: bytes) -> tuple[int, int]:
    end = tail.rfind(END)
    if end < 0:
        raise ValueError("no end record")
    size, offset = struct.unpack_from("<II", tail, end + 12)
    if size == 0xFFFFFFFF or offset == 0xFFFFFFFF:
        size, offset = struct.unpack_from("<QQ", tail, tail.rindex(END64, 0, end) + 40)
    return size, offset


def _entries(content: bytes, start: int) -> dict[str, Slot]:
    slots: dict[str, Slot] = {}
    lower_names: set[str] = set()
    offset = 0
    while offset < len(content):
        mark, method, crc, packed, size, name, extra, comment, header = ENTRY_FIELDS.unpack_from(content, offset)
        if mark != ENTRY:
            raise ValueError("an entry is missing")
        name_start = offset + ENTRY_FIELDS.size
        size, packed, header = _zip64((size, packed, header), content[name_start + name : name_start + name + extra])
        if method != 0 or packed != size:
            raise ValueError("a compressed record")
        key = content[name_start : name_start + name].decode().partition("/")[2]
        if key.lower() in lower_names:  # torch ignores the case of records' names
            raise ValueError("two records of one name")
        lower_names.add(key.lower())
        slots[key] = Slot(crc, size, header, start + offset)
        offset = name_start + name + extra + comment
    return slots


def _zip64(fields: tuple[int, int, int], extra: bytes) -> tuple[int, int, int]:
    if 0xFFFFFFFF not in fields:
        return fields
    offset = 0
    while offset + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, offset)
        if kind == 1:
            values = iter(struct.unpack_from(f"<{length // 8}Q", extra, offset + 4))
            first, second, third = (next(values) if field == 0xFFFFFFFF else field for field in fields)
            return first, second, third
        offset += 4 + length
    raise ValueError("a size is missing")


def load(reader: FileReader, path: Path, more: Admitted | None = None) -> Any:
    """The object in a file of torch.save, with a `View` for each tensor; no tensor is read.

    `more`: admitted names besides those of tensors.
    """
    if reader.bytes_of(path, 0, 4) != LOCAL:
        raise damaged(path, "is not a file of torch.save's zip format (torch 1.6 or newer), or is damaged")
    return Archive(reader, path, 0, reader.size_of(path)).load({**TENSORS, **(more or {})})
