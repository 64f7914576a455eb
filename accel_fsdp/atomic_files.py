"""Writes files and folders completely or not at all: beside the target, then synced and renamed."""

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from accel_fsdp.errors import UserError

if TYPE_CHECKING:
    from filelock import FileLock

RUN_LOCK = ".run.lock"
"""The file in a run's folder that its process locks; it stays when the run has ended."""


def write_text(path: Path, text: str) -> None:
    """Writes `text` to `path` atomically; an existing file keeps its links, permissions and line ends.

    Devices and pipes are written to, not replaced.

    Raises:
        UserError: the folder is not writable, or the disk is full. `path` is then as it was before.
    """
    try:
        if _is_stream(path):
            path.write_text(text, encoding="utf-8")
            return
        path = path.resolve()
        exists, newline = path.exists(), "\n"
        if exists:
            with path.open("r+b") as existing:  # fails where the file is read-only, which a rename would ignore
                content = existing.read()
            newline = "\r\n" if 0 < content.count(b"\n") == content.count(b"\r\n") else "\n"
        with new_file(path) as temporary:
            with temporary.open("w", encoding="utf-8", newline=newline) as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            if exists:
                shutil.copymode(path, temporary)
    except (OSError, RuntimeError) as error:  # a link to itself raises RuntimeError
        raise _cannot_write(path, error) from error


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yields a path to write to, with the name of `path`, for the end of the block, when it replaces `path`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", dir=path.parent) as folder:
            temporary = Path(folder) / path.name
            yield temporary
            os.replace(temporary, path)
        sync_names(path.parent)
    except OSError as error:
        raise _cannot_write(path, error) from error


def _mode(path: Path) -> int:
    """The type and permissions of a path, links followed; 0 if it doesn't exist."""
    try:
        return os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0
    except OSError as error:  # a name that is too long, a folder that may not be entered
        raise _cannot_write(path, error) from error


def _is_stream(path: Path) -> bool:
    """Whether `path` is a character device, such as a terminal or /dev/null, or a pipe: neither can be replaced."""
    mode = _mode(path)
    return stat.S_ISCHR(mode) or stat.S_ISFIFO(mode)


def is_taken(path: Path) -> bool:
    """Whether writing `path` would replace something; a device or a pipe isn't replaced.

    Raises:
        UserError: `path` can't be examined, for example without permission, or because its name is too long.
    """
    return _mode(path) != 0 and not _is_stream(path)


def refuse_existing(
    path: Path, why: str = "it may be the config of another job", flag: str = "-o", allow: str = "--force"
) -> None:
    """Refuses to overwrite a file unless the user allows it.

    Raises:
        UserError: there is such a file, or a folder, or the name is empty.
    """
    if not is_taken(path):
        return
    if path.is_dir():
        raise UserError(f"{path} is a folder", why=f"{flag} takes the file to write", fix=f"{flag} {path}/NAME")
    raise UserError(f"{path} exists", why=why, fix=f"add {allow}, or choose another {flag} FILE")


def existing_part(path: Path) -> Path:
    return next(part for part in (path.absolute(), *path.absolute().parents) if part.exists())


def check_writable(folder: Path) -> None:
    """Proves that `folder` can be made and written to, before hours of work depend on it. Leaves nothing behind."""
    try:
        with tempfile.TemporaryFile(dir=existing_part(folder)) as probe:
            probe.write(b"x")
    except OSError as error:
        raise _cannot_write(folder, error) from error


@contextlib.contextmanager
def replaced_folder(target: Path, sync: bool = True) -> Iterator[Path]:
    """Yields an empty folder beside `target` that takes its place when the block ends; on any error it is removed.

    An existing `target` stays until the new folder is complete; a process that is ended between the two renames leaves
    it beside, and the next one puts it back. Without `sync` the files may still be on their way to the disk at the end.
    """
    temporary, old = (target.with_name(f".{target.name}.{end}") for end in ("tmp", "old"))
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = _lock(target.with_name(f".{target.name}.lock"), f"another process is writing {target}", "wait for its end")
    try:
        if old.exists() and not target.exists():
            os.replace(old, target)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        yield temporary
        if sync:
            sync_folder(temporary)
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.replace(target, old)
        os.replace(temporary, target)
        sync_names(target.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()


def _lock(path: Path, busy: str, fix: str) -> "FileLock":
    """Locks a file for this process; the system drops the lock when the process ends."""
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        check_writable(path.parent)  # otherwise the lock isn't held: no file can be created
        raise UserError(busy, why="two would write the same files", fix=fix) from error
    return lock


def only_run(folder: Path) -> "FileLock":
    """Locks `folder` for this process, so that two runs can't write their checkpoints and exports over one another."""
    folder.mkdir(parents=True, exist_ok=True)
    fix = "wait until it has ended, or choose another --output_dir"
    return _lock(folder / RUN_LOCK, f"another run is writing to {folder}", fix)


def sync_folder(folder: Path) -> None:
    """Flushes every file of `folder` to disk and opens it to the readers the umask allows.

    safetensors 0.8.0 writes mode 0600 regardless of the umask, so other users could not serve the export.
    """
    mask = os.umask(0)
    os.umask(mask)
    for path in (path for path in folder.rglob("*") if path.is_file()):
        path.chmod(0o666 & ~mask)
        with path.open("rb") as file:
            os.fsync(file.fileno())


def sync_names(folder: Path) -> None:
    """Flushes the names in `folder`, so that a rename outlives a power cut; some systems have no such call."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _cannot_write(path: Path, error: Exception) -> UserError:
    return UserError(
        f"cannot write {path}: {getattr(error, 'strerror', None) or error}",
        why="the result would be lost",
        fix="choose another file, in a folder you may write to, or free some space on that disk",
    )
