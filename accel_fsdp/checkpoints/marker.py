"""The marker of a checkpoint, `complete.json`: its files with their sizes and hashes, and the run that wrote them."""

import os
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accel_fsdp import untrusted_files
from accel_fsdp.checkpoints import file_names

UNFINISHED = '{"complete": false}'
"""The content of the marker of a checkpoint that is being written or deleted."""
HASHED_TOGETHER = 4
HASHED_BYTES = 1 << 22


@dataclass(frozen=True)
class Origin:
    """The properties of the run that wrote a checkpoint; a run that resumes it must have the same.

    `engine` is FSDP, DDP (one process too) or ZeRO with its stage; `rows_per_step` counts the rows of all ranks in one
    step of the optimizer. Zeros are unknown.
    """

    engine: str
    ranks: int = 0
    rows_per_step: int = 0
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The settings of the training, by the names of `lineage.settings`; empty: unknown."""
    before: Sequence[Mapping[str, Any]] = ()
    """Earlier parts of the run with other settings: the last step and the settings of each."""


@dataclass(frozen=True)
class Marker:
    """The content of `complete.json`: sizes and hashes by the files' paths relative to the checkpoint."""

    complete: bool
    origin: Origin | None = None
    sizes: dict[str, int] = field(default_factory=dict)
    hashes: dict[str, str] = field(default_factory=dict)


def content_of(checkpoint: Path) -> bytes | None:
    """The marker's bytes; None if there is none."""
    return untrusted_files.read_bytes(checkpoint / file_names.MARKER)


def read(checkpoint: Path) -> Marker | None:
    """The marker; None if there is none."""
    content = content_of(checkpoint)
    return None if content is None else parsed(content, checkpoint / file_names.MARKER)


def parsed(text: bytes, path: Path) -> Marker:
    """The marker of this content; `path` names it in errors."""
    content = untrusted_files.mapping(text, path)
    if content.get("complete") is False:
        return Marker(complete=False)
    sizes, hashes, origin = content.get("files"), content.get("hashes", {}), content.get("origin", {})
    if content.get("complete") is not True or not _is_list(sizes, int) or not _is_list(hashes, str):
        raise untrusted_files.broken(path, "is damaged: no list of files")
    return Marker(True, _origin(path, origin), dict(sizes or {}), dict(hashes))


def _is_list(value_by_name: Any, kind: type) -> bool:
    """Whether `value_by_name` maps names of files inside the folder to values of `kind`."""
    return isinstance(value_by_name, dict) and all(
        type(value) is kind and untrusted_files.is_inside(name) for name, value in value_by_name.items()
    )


def _origin(path: Path, content: Any) -> Origin | None:
    try:
        origin = Origin(**content) if content else None
        steps = [part["last_step"] + 0 for part in origin.before] if origin else []
        if origin and not all(type(number) is int for number in (origin.ranks, origin.rows_per_step, *steps)):
            raise TypeError("a count is not a whole number")
    except (TypeError, KeyError) as error:
        raise untrusted_files.broken(path, "is damaged: its description of the run") from error
    return origin


def origin_of(checkpoint: Path) -> Origin | None:
    marker = read(checkpoint)
    return marker.origin if marker else None


def files_in(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def sizes_of(checkpoint: Path) -> dict[str, int]:
    """The sizes of all files but the marker, by their paths relative to the checkpoint."""
    sizes = {str(path.relative_to(checkpoint)): path.stat().st_size for path in files_in(checkpoint)}
    sizes.pop(file_names.MARKER, None)
    return sizes


def of_ranks(names: Iterable[str], ranks: Container[int], world_size: int) -> list[str]:
    """The files that some ranks wrote: those with their numbers in the names, and on the first rank all others."""
    matches = {name: file_names.OF_RANK.search(name) for name in names}
    return [name for name, match in matches.items() if int(match[1] if match else 0) % world_size in ranks]


def own_hashes(checkpoint: Path, rank: int, world_size: int) -> dict[str, str]:
    """Hashes of the files that this rank wrote."""
    return hashes_of(checkpoint, of_ranks(sizes_of(checkpoint), [rank], world_size))


def hashes_of(checkpoint: Path, names: Iterable[str]) -> dict[str, str]:
    names = list(names)
    with ThreadPoolExecutor(HASHED_TOGETHER) as pool:
        return dict(zip(names, pool.map(lambda name: _hash(checkpoint / name, checkpoint), names), strict=True))


def _hash(path: Path, within: Path) -> str:
    import xxhash

    digest = xxhash.xxh3_128()
    with untrusted_files.opened(path, within) as file:
        block = memoryview(bytearray(min(HASHED_BYTES, os.fstat(file.fileno()).st_size + 1)))
        while count := file.readinto(block):  # type: ignore[attr-defined]
            digest.update(block[:count])
    return digest.hexdigest()


def damage(checkpoint: Path, needed: Callable[[str], bool] = bool, part: int = 0, of: int = 1) -> str:
    """Names the first `needed` file whose bytes have changed; empty if there is none.

    Each of several ranks reads a `part` of about the same size. Missing files are skipped, and a marker without hashes,
    from an earlier version, can't show changed bytes.
    """
    marker = read(checkpoint)
    if marker is None:
        return ""
    names = [name for name in marker.hashes if needed(name) and (checkpoint / name).exists()]
    names.sort(key=lambda name: (-marker.sizes.get(name, 0), name))
    hashes = hashes_of(checkpoint, names[part::of])
    changed = sorted(name for name, hashed in hashes.items() if hashed != marker.hashes[name])
    return f"{changed[0]} has changed since it was written" if changed else ""
