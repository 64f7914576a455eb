"""Opens files in folders from untrusted sources: checkpoints, models, exports. The package uses no other way.

A file may be a link to another place of its folder, but not out of it: an untrusted folder must not point to the user's
other files. The only exception is the layout of huggingface_hub's cache. The folder itself may be a link, because the
user named it. Only plain files are opened: pipes and devices may have no end.
"""

import json
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from typing import Any, BinaryIO

from accel_fsdp.errors import UserError


@contextmanager
def opened(path: Path, within: Path | None = None) -> Iterator[BinaryIO]:
    """Opens a plain file for reading; `within` is the folder that its links may not leave, else the one it is in.

    Raises:
        FileNotFoundError: there is none.
        UserError: it is a link out of the folder, not a plain file, or can't be read.
    """
    try:
        place = _place(path, within or path.parent)
        if not stat.S_ISREG(os.stat(place).st_mode):  # opening a device may act on it
            raise unreadable(path, "it is not a file")
        file = place.open("rb")
    except (FileNotFoundError, NotADirectoryError) as error:
        if path.is_symlink():
            raise leads_nowhere(path) from error
        raise FileNotFoundError(f"{path} is not there") from error
    except (OSError, RuntimeError, ValueError) as error:  # a RuntimeError is a link to itself, a ValueError an odd name
        raise unreadable(path, getattr(error, "strerror", None) or str(error)) from error
    with file:
        yield file


def check(path: Path, within: Path | None = None) -> None:
    """Raises as `opened`."""
    with opened(path, within):
        pass


def leads_nowhere(link: Path) -> UserError:
    return unreadable(link, f"it is a link to {os.readlink(link)}, where there is nothing")


def _place(path: Path, within: Path) -> Path:
    root, place = within.resolve(), path.resolve(strict=True)
    # huggingface_hub's links lead from REPO/snapshots/REVISION/ to REPO/blobs/
    in_hub_cache = root.parent.name == "snapshots" and place.parent == root.parent.parent / "blobs"
    if place.is_relative_to(root) or in_hub_cache:
        return place
    raise UserError(
        f"{path} is a link to {place}, outside of its folder",
        why="a checkpoint doesn't belong there; nothing was read",
        fix=f"if the link is yours, name {place} itself, or replace the link by it; else don't trust this folder",
    )


def check_folder(folder: Path, within: Path) -> None:
    """Refuses a folder that is, or is behind, a link out of the folder that the user named."""
    with suppress(OSError, RuntimeError, ValueError):  # reported when it is read
        _place(folder, within)


def is_inside(name: str) -> bool:
    """Whether the name of a file stays inside of the folder that it is relative to."""
    path = PurePath(name)
    return not path.is_absolute() and ".." not in path.parts and "\0" not in name and path != PurePath()


def inside(folder: Path, name: str, index: str) -> Path:
    """The path of a file that the `index` of a folder names.

    Raises:
        UserError: the name leads elsewhere, by its parts or through a link.
    """
    path = folder / name
    if not is_inside(name):
        raise UserError(
            f"{folder / index} points to {name[:200]!r}, outside of its folder",
            why="a checkpoint doesn't belong there; nothing was read",
            fix="don't trust this checkpoint; get it again from where it was written",
        )
    check_folder(path, folder)
    return path


def unreadable(path: Path, reason: str) -> UserError:
    return UserError(
        f"{path} can't be read: {reason}",
        why="it may change the meaning of the other files",
        fix="put a file there that you may read, or remove it",
    )


def broken(path: Path, what: str) -> UserError:
    """The error for a file that is damaged or missing."""
    return UserError(
        f"{path} {what}",
        why="what is read would be wrong",
        fix="copy that file again from where it was written, or take an older checkpoint",
    )


def read_bytes(path: Path, within: Path | None = None) -> bytes | None:
    """The content of a file; None if the file doesn't exist."""
    try:
        with opened(path, within) as file:
            return file.read()
    except FileNotFoundError:
        return None


def read_json(path: Path, within: Path | None = None) -> dict[str, Any]:
    """The mapping in a JSON file; empty if the file doesn't exist."""
    content = read_bytes(path, within)
    return {} if content is None else mapping(content, path)


def mapping(content: bytes, path: Path) -> dict[str, Any]:
    """Parses a JSON mapping. NaN is a number, and the last of two equal keys counts."""
    try:
        parsed = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise broken(path, f"is damaged or cut short: no JSON ({str(error)[:100]})") from error
    if not isinstance(parsed, dict):
        raise broken(path, f"is damaged: a mapping is expected, not {type(parsed).__name__}")
    return parsed


def copy(path: Path, target: Path, within: Path | None = None) -> None:
    """Copies a file's bytes, never a link.

    Raises:
        FileNotFoundError, UserError: as `opened`.
        OSError: one of the two can't be read or written.
    """
    with opened(path, within) as file, target.open("wb") as copied:
        shutil.copyfileobj(file, copied)
