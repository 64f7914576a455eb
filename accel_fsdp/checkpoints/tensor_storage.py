"""Tensors in files: which bytes make them up, and how to read a part of one into a buffer."""

import os
import threading
import zlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from operator import lt, mul, sub
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from accel_fsdp import untrusted_files
from accel_fsdp.errors import UserError
from accel_fsdp.file_positions import read_at

if TYPE_CHECKING:
    import numpy as np

ITEM_BYTES = {
    **{"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2},
    **{"U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "C64": 8},
    **{"F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1},
}
"""Bytes per element, by the name of the dtype in safetensors' headers."""
TORCH_NAMES = {
    **{"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32"},
    **{"I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn"},
    **{"F8_E5M2": "float8_e5m2", "C64": "complex64", "U64": "uint64", "U32": "uint32", "U16": "uint16"},
    **{"F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz"},
}
"""torch's names of the same dtypes."""
FLOATS = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"})
"""Dtypes that are cast on request; numbers of F8_E8M0 are exponents that scale others."""
GAP_BYTES = 1 << 24
LONGEST_ROW = 1 << 22
SPREAD, SMALL_READ = 2, 4096
"""A run of bytes is read at once if it is at most this many times the requested bytes, or at most this many bytes."""
MOST_CUTS = 8
"""Dimensions along which the ranks of a mesh may cut one tensor; known are 3."""
CRC_POLYNOMIAL = 0xEDB88320  # of zip and zlib, bits reversed


def damaged(path: Path, what: str) -> UserError:
    return UserError(
        f"{path} {what}",
        why="what is read would be wrong",
        fix="copy that file again from where it was written, or take an older checkpoint",
    )


@dataclass(frozen=True)
class FileRecord:
    """A run of bytes in a file, and its CRC-32 where the file has one."""

    path: Path
    start: int
    length: int
    crc: int | None = None


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, stored in C order (or by `strides`, in elements), beginning `skip` bytes into its record."""

    record: FileRecord
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    skip: int = 0
    strides: tuple[int, ...] | None = None


class Source(Protocol):
    """The elements of a tensor in C order; a part begins and ends at a multiple of `unit` elements."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def unit(self) -> int:
        """The number of elements."""

    def read(self, reader: "FileReader", start: int, stop: int, buffer: memoryview) -> None:
        """Fills `buffer` with elements `start` to `stop`."""


@dataclass(frozen=True)
class Stored:
    """A tensor made of pieces. Pieces that span whole rows are one-dimensional, of the flattened tensor."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    flat: bool = True

    @property
    def unit(self) -> int:
        """The elements of a row, if the pieces don't span rows and a row is no larger than a block; else 1."""
        row = prod(self.shape[1:])
        return 1 if self.flat or row > LONGEST_ROW else row

    @property
    def content(self) -> tuple[Any, ...]:
        """A key that is equal for tensors of the same bytes, or of bytes with the same lengths and checksums."""
        pieces = []
        for piece in self.pieces:
            record = piece.record if piece.record.crc is None else (piece.record.length, piece.record.crc)
            pieces.append((record, piece.offsets, piece.sizes, piece.skip, piece.strides))
        return self.dtype, self.shape, pieces

    def read(self, reader: "FileReader", start: int, stop: int, buffer: memoryview) -> None:
        """Fills `buffer` with elements `start` to `stop`, multiples of `unit`."""
        if self.flat:
            self._read_spans(reader, start, stop, buffer)
        else:
            self._read_boxes(reader, start, stop, buffer)

    def _read_spans(self, reader: "FileReader", start: int, stop: int, buffer: memoryview) -> None:
        item = ITEM_BYTES[self.dtype]
        first = bisect_right(self.pieces, start, key=lambda piece: piece.offsets[0]) - 1
        for piece in self.pieces[max(first, 0) :]:
            offset = piece.offsets[0]
            low, high = max(start, offset), min(stop, offset + piece.sizes[0])
            if offset >= stop:
                break
            if low < high:
                view = buffer[(low - start) * item : (high - start) * item]
                reader.read(piece.record, piece.skip + (low - offset) * item, view)

    def _read_boxes(self, reader: "FileReader", start: int, stop: int, buffer: memoryview) -> None:
        import numpy as np

        item, offset = ITEM_BYTES[self.dtype], 0
        for offsets, sizes in boxes(self.shape, start, stop):
            count = prod(sizes) * item
            target = np.frombuffer(buffer[offset : offset + count], f"V{item}").reshape(sizes)
            offset += count
            for piece in self.pieces:
                low = tuple(map(max, offsets, piece.offsets))
                high = tuple(
                    min(a + b, c + d) for a, b, c, d in zip(offsets, sizes, piece.offsets, piece.sizes, strict=True)
                )
                if all(map(lt, low, high)):
                    part = target[tuple(slice(a - c, b - c) for a, b, c in zip(low, high, offsets, strict=True))]
                    _fill(reader, piece, item, part, tuple(map(sub, low, piece.offsets)))


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Splits elements `start` to `stop` of a tensor in C order into boxes, given by offsets and sizes."""
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # the elements are all in one row
        first = last = start // row
        yield from _in_row(shape, first, start - first * row, stop - first * row)
        return
    if start < first * row:
        yield from _in_row(shape, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if last * row < stop:
        yield from _in_row(shape, last, 0, stop - last * row)


def _in_row(
    shape: tuple[int, ...], row: int, start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for offsets, sizes in boxes(shape[1:], start, stop):
        yield (row, *offsets), (1, *sizes)


def _fill(
    reader: "FileReader", piece: Piece, item: int, target: "np.ndarray[Any, Any]", offsets: tuple[int, ...]
) -> None:
    """Fills `target` with the box of a piece that begins at `offsets`.

    A box of contiguous bytes is read at once; another one is divided along the dimension with the largest stride. So a
    transposed tensor is read in contiguous runs, and memory holds no more than the requested elements.
    """
    import numpy as np

    strides = piece.strides or c_order(piece.sizes)
    extents = [(size - 1) * stride for size, stride in zip(target.shape, strides, strict=True)]
    span = (1 + sum(extents)) * item
    widest = max(range(len(extents)), key=extents.__getitem__)
    if span > max(SPREAD * target.size * item, SMALL_READ) and target.shape[widest] > 1:
        half = target.shape[widest] // 2
        before: tuple[slice, ...] = (slice(None),) * widest
        moved = (*offsets[:widest], offsets[widest] + half, *offsets[widest + 1 :])
        for part, start in ((slice(None, half), offsets), (slice(half, None), moved)):
            place = (*before, part)
            _fill(reader, piece, item, target[place], start)
        return
    content = bytearray(span)
    begin = piece.skip + sum(map(mul, offsets, strides)) * item
    reader.read(piece.record, begin, memoryview(content), in_order=piece.strides is None)
    target[...] = np.ndarray(target.shape, f"V{item}", content, 0, [stride * item for stride in strides])


def c_order(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(sizes[dimension + 1 :]) for dimension in range(len(sizes)))


def part_of(reader: "FileReader", source: Source, start: int, stop: int) -> bytearray:
    content = bytearray((stop - start) * ITEM_BYTES[source.dtype])
    source.read(reader, start, stop, memoryview(content))
    return content


def tensor(name: str, dtype: str, shape: tuple[int, ...], pieces: Sequence[Piece]) -> Stored:
    """A tensor of these boxes, which must fill it: all inside, without overlaps, and with sizes that add up to it."""
    elements = sum(prod(piece.sizes) for piece in pieces)
    if elements != prod(shape) or any(len(piece.offsets) != len(shape) for piece in pieces):
        path = pieces[0].record.path if pieces else Path(name)
        raise damaged(path, f"and its siblings hold {elements} of the {prod(shape)} elements of {name}")
    if not _fill_exactly(shape, pieces):
        raise damaged(pieces[0].record.path, f"and its siblings hold some elements of {name} twice, others never")
    if not prod(shape):
        return Stored(dtype, shape, tuple(pieces))
    row = prod(shape[1:])
    whole_rows = all(piece.sizes[1:] == shape[1:] and piece.strides is None for piece in pieces)
    if shape and not whole_rows:
        return Stored(dtype, shape, tuple(pieces), flat=False)
    flat = [
        Piece(piece.record, ((piece.offsets[0] if shape else 0) * row,), (prod(piece.sizes),), piece.skip)
        for piece in pieces
    ]
    return Stored(dtype, shape, tuple(sorted(flat, key=lambda piece: piece.offsets)))


def _fill_exactly(shape: tuple[int, ...], pieces: Sequence[Piece]) -> bool:
    """Whether boxes cover each element once.

    Each corner of a box has a sign, which flips for each dimension in which the corner is the end. The signs of the
    boxes add up to those of the whole if, and only if, the boxes add up to it.
    """
    spans = [[(low, low + size) for low, size in zip(piece.offsets, piece.sizes, strict=True)] for piece in pieces]
    full = [(0, size) for size in shape]
    cut = [dimension for dimension in range(len(shape)) if any(span[dimension] != full[dimension] for span in spans)]
    if not cut or len(cut) > MOST_CUTS:
        return not cut
    counts: Counter[tuple[int, ...]] = Counter()
    for span, sign in [(full, -1), *((span, 1) for span in spans)]:
        for ends in product(range(2), repeat=len(cut)):
            corner = tuple(span[dimension][end] for dimension, end in zip(cut, ends, strict=True))
            counts[corner] += sign * (-1) ** sum(ends)
    return not any(counts.values())


class FileReader:
    """Reads records from several threads and keeps the checksum of every part read."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._parts: dict[FileRecord, list[tuple[int, int, int]]] = {}

    def read(self, record: FileRecord, skip: int, view: memoryview, in_order: bool = True) -> None:
        """Fills `view` with the bytes that begin `skip` bytes into the record.

        The checksum of many small parts, which aren't read `in_order`, is computed at the end, from the whole record.
        """
        if skip + len(view) > record.length:
            raise damaged(record.path, "holds less than its index says")
        self.read_bytes(record.path, record.start + skip, view)
        if record.crc is not None:
            parts = [(skip, len(view), zlib.crc32(view))] if in_order else []
            with self._lock:
                self._parts.setdefault(record, []).extend(parts)

    def read_bytes(self, path: Path, at: int, view: memoryview) -> None:
        descriptor, bytes_read = self._open(path), 0
        while bytes_read < len(view):
            try:
                count = read_at(descriptor, view[bytes_read:], at + bytes_read)
            except OSError as error:  # the disk of the source may fail
                raise untrusted_files.unreadable(path, error.strerror or str(error)) from error
            if count == 0:
                raise damaged(path, f"is cut short: it ends at byte {at + bytes_read}")
            bytes_read += count

    def bytes_of(self, path: Path, at: int, length: int) -> bytes:
        """A few bytes of a file, without a checksum; fewer at its end."""
        content = bytearray(length)
        try:
            count = read_at(self._open(path), memoryview(content), at)
        except OSError as error:
            raise untrusted_files.unreadable(path, error.strerror or str(error)) from error
        return bytes(content[:count])

    def size_of(self, path: Path) -> int:
        return os.fstat(self._open(path)).st_size

    def _open(self, path: Path) -> int:
        with self._lock:
            if path not in self._descriptors:
                try:
                    self._descriptors[path] = untrusted_files.open_file(path)
                except FileNotFoundError as error:
                    raise damaged(path, "is missing") from error
            return self._descriptors[path]

    def check(self) -> int:
        """Compares the checksum of every record that was read with the one in its file; returns the number of records.

        Parts of a record that no tensor needed, such as padding, are read now.
        """
        for record, parts in self._parts.items():
            longest_first = sorted(parts, key=lambda part: (part[0], -part[1]))
            if self._checksum(record, longest_first) != record.crc:
                raise damaged(
                    record.path,
                    f"is damaged: the checksum of bytes {record.start} to {record.start + record.length} is wrong",
                )
        return len(self._parts)

    def _checksum(self, record: FileRecord, parts: list[tuple[int, int, int]]) -> int:
        total, end = 0, 0
        for skip, length, crc in [*parts, (record.length, 0, 0)]:
            while end < skip:
                gap = memoryview(bytearray(min(GAP_BYTES, skip - end)))
                self.read_bytes(record.path, record.start + end, gap)
                total, end = zlib.crc32(gap, total), end + len(gap)
            if skip == end:  # else it overlaps an earlier one: some tensors are read twice
                total, end = joined_crc(total, crc, length), skip + length
        return total

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()


def joined_crc(first: int, second: int, second_bytes: int) -> int:
    """The CRC-32 of two runs of bytes in a row, from the CRC-32 of each: first * x^(8 * second_bytes) + second."""
    if first == 0 or second_bytes == 0:  # most records are read at once
        return first ^ second
    factor, square, count = 1 << 31, 1 << 23, second_bytes  # x^0 and x^8, bits reversed
    while count:
        if count & 1:
            factor = _product(factor, square)
        square, count = _product(square, square), count >> 1
    return _product(factor, first) ^ second


def _product(factor: int, power: int) -> int:
    """The product of two polynomials over GF(2), modulo the CRC's; the highest bit is the coefficient of x^0."""
    total = 0
    while factor:
        if factor & (1 << 31):
            total ^= power
        factor = (factor << 1) & 0xFFFFFFFF
        power = (power >> 1) ^ (CRC_POLYNOMIAL if power & 1 else 0)
    return total
