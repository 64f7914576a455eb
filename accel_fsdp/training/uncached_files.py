"""Files that are written past the system's cache, which takes as much of the cores' time as all else of a write.

Where the system or the disk's file system has no `O_DIRECT`, they are written as all files are.
"""

import contextlib
import errno
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem

from accel_fsdp.checkpoints import marker
from accel_fsdp.library_internals import Internal

RELIES_ON = (Internal("torch.distributed.checkpoint.filesystem:FileSystem.create_stream", "self path mode"),)

PIECE_BYTES = 1 << 22


class UncachedFiles(FileSystem):
    """For the `fs` of torch's `FileSystemWriter`. It calls `between` after each piece of a file."""

    def __init__(self, between: Callable[[], None]) -> None:
        self._between = between
        self.hashes: dict[Path, str] = {}
        """Those of the files that are complete, as the marker has them."""

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        """A new file, whatever the mode: a writer only writes."""
        file = UncachedFile(Path(path), self._between)
        try:
            yield file
            file.close()
        finally:
            file.abandon()
        self.hashes[Path(path)] = file.hashed.hexdigest()


class UncachedFile:
    """A new file that is written from its start to its end, in whole pieces; hashed on the way."""

    def __init__(self, path: Path, between: Callable[[], None]) -> None:
        self.hashed, self._between = marker.hasher(), between
        self._file = path.open("wb", buffering=0)
        self._piece = memoryview(mmap.mmap(-1, PIECE_BYTES))  # O_DIRECT needs whole pages
        self._filled = self._written = 0
        self._is_direct = self._direct(True)

    def _direct(self, wanted: bool) -> bool:
        """Turns O_DIRECT on or off, where there is one; whether it is on."""
        flag = getattr(os, "O_DIRECT", 0)
        if not flag:
            return False
        import fcntl  # only Unix has it

        flags = fcntl.fcntl(self._file, fcntl.F_GETFL) & ~flag
        try:
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags | flag * wanted)
        except OSError:
            return False
        return wanted

    def write(self, data: Any) -> int:
        rest = memoryview(data).cast("B")
        size = len(rest)
        while rest:
            count = min(len(rest), PIECE_BYTES - self._filled)
            self._piece[self._filled : self._filled + count] = rest[:count]
            self._filled, rest = self._filled + count, rest[count:]
            if self._filled == PIECE_BYTES:
                self._put()
        return size

    def _put(self) -> None:
        rest = self._piece[: self._filled]
        self.hashed.update(rest)
        while rest:
            try:
                rest = rest[self._file.write(rest) :]
            except OSError as error:
                if error.errno != errno.EINVAL or not self._is_direct:
                    raise
                self._is_direct = self._direct(False)  # this file system wants still larger units
        self._written, self._filled = self._written + self._filled, 0
        self._between()

    def tell(self) -> int:
        return self._written + self._filled

    def flush(self) -> None:
        """Does nothing: only whole pieces are written before the end."""

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        """Writes the rest, which may end within a page, and waits until the disk has all."""
        if not self._file.closed:
            self._is_direct = self._direct(False)
            self._put()
            os.fsync(self._file)
            self._file.close()

    def abandon(self) -> None:
        """Closes the file as it is."""
        self._file.close()
