"""Decides which checkpoints are complete, which one a resume takes, and which are deleted.

All other modules ask this one: a resume needs all of a checkpoint (`flaw`, then `lacking_to_resume`), a reader of the
weights only needs complete weights (`unfinished`).

`checkpoint-N/complete.json` marks a folder as being written, from before its first file until all files are on disk;
then one rename replaces it by the list of their sizes and hashes. A folder without a marker was written by plain
Trainer, and is complete if it has the files that Trainer and torch write last.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from accel_fsdp import atomic_files, untrusted_files
from accel_fsdp.checkpoints import deepspeed, file_names
from accel_fsdp.errors import UserError

MOST_LOGGED = 20_000_000
"""At most so many numbers in `trainer_state.json`, which logs all steps."""
HASHED_TOGETHER = 4
HASHED_BYTES = 1 << 22


@dataclass(frozen=True)
class Origin:
    """The properties of the run that wrote a checkpoint that a run that resumes it must share.

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


@dataclass(frozen=True)
class Parts:
    """The parts of a run in a folder, by the names of its files.

    `sharded` and `full`: how FSDP's model weights are stored; `hub`: the folder has Hugging Face weights.
    `by_accelerator`: `Accelerator.save_state` wrote it; `exported`: `accel-fsdp export` did. Neither writes a
    `trainer_state.json`.
    """

    name: str
    sharded: bool = False
    full: bool = False
    hub: bool = False
    optimizer: bool = False
    scheduler: bool = False
    trainer_state: bool = False
    by_accelerator: bool = False
    exported: bool = False

    @property
    def is_checkpoint(self) -> bool:
        has_state = self.sharded or self.full or self.optimizer or self.scheduler or self.trainer_state
        return has_state and not self.exported

    @property
    def is_cut_short(self) -> bool:
        """Whether the file that Trainer writes last is missing."""
        return self.is_checkpoint and not self.trainer_state and not self.by_accelerator

    @property
    def new_state(self) -> tuple[str, ...]:
        """The missing files besides the weights: Trainer starts their state anew, without a warning."""
        there = {file_names.OPTIMIZER: self.optimizer, file_names.SCHEDULER: self.scheduler}
        return tuple(name for name, is_there in there.items() if not is_there)


@dataclass(frozen=True)
class Choice:
    """The newest complete checkpoint of a run, and why each newer one was skipped."""

    newest: Path | None
    skipped: dict[Path, str] = field(default_factory=dict)


def begin(checkpoint: Path) -> None:
    """Creates the folder with a marker that it isn't complete; call before any rank writes into it.

    A complete checkpoint of the same step stays beside it until `seal` or `abandon`.

    Raises:
        UserError: the folder can't be written; `abandon` it.
    """
    there = checkpoint.exists()
    whole = there and not flaw(checkpoint)
    if whole or not there:
        _remove(_aside(checkpoint))  # of a run that was killed while it deleted
    if whole:
        os.replace(checkpoint, _aside(checkpoint))
    _remove(checkpoint)
    atomic_files.write_text(checkpoint / file_names.MARKER, json.dumps({"complete": False}))


def seal(checkpoint: Path, origin: Origin, hashes: Mapping[str, str] | None = None) -> None:
    """Declares the checkpoint complete, once all its files are on disk; call when every rank has written its own.

    `hashes`: those of all files, if the ranks have taken them; otherwise they are taken now.

    Raises:
        UserError: the marker can't be written. The checkpoint then counts as half-written.
    """
    atomic_files.sync_folder(checkpoint)
    sizes = _sizes(checkpoint)
    taken = hashes_of(checkpoint, sizes) if hashes is None else dict(hashes)
    content = {"complete": True, "origin": asdict(origin), "files": sizes, "hashes": taken}
    atomic_files.write_text(checkpoint / file_names.MARKER, json.dumps(content, indent=1, sort_keys=True))
    atomic_files.sync_names(checkpoint.parent)
    _remove(_aside(checkpoint))


def abandon(checkpoint: Path) -> None:
    """Removes a half-written checkpoint, and moves back a complete one of the same step that `begin` moved."""
    if flaw(checkpoint):
        _remove(checkpoint)
    aside = _aside(checkpoint)
    if not checkpoint.exists() and not flaw(aside):
        os.replace(aside, checkpoint)


def _sizes(checkpoint: Path) -> dict[str, int]:
    sizes = {str(path.relative_to(checkpoint)): path.stat().st_size for path in _files(checkpoint)}
    sizes.pop(file_names.MARKER, None)
    return sizes


def own_hashes(checkpoint: Path, rank: int, ranks: int) -> dict[str, str]:
    """Hashes of the files that this rank wrote, which are still in the system's cache: those with its number in their
    names, and on the first rank all others.
    """
    numbered = {name: int(writer) % ranks for name in _sizes(checkpoint) if (writer := _rank_in(name))}
    return hashes_of(checkpoint, [name for name in _sizes(checkpoint) if numbered.get(name, 0) == rank])


def _rank_in(name: str) -> str:
    match = file_names.OF_RANK.search(name)
    return match[1] if match else ""


def hashes_of(checkpoint: Path, names: Iterable[str]) -> dict[str, str]:
    names = list(names)
    with ThreadPoolExecutor(HASHED_TOGETHER) as pool:
        return dict(zip(names, pool.map(lambda name: _hash(checkpoint / name, checkpoint), names), strict=True))


def _hash(path: Path, within: Path) -> str:
    import xxhash

    digest, block = xxhash.xxh3_128(), memoryview(bytearray(HASHED_BYTES))
    with untrusted_files.opened(path, within) as file:
        while count := file.readinto(block):  # type: ignore[attr-defined]
            digest.update(block[:count])
    return digest.hexdigest()


def read(checkpoint: Path) -> Marker | None:
    """The marker; None if there is none."""
    path = checkpoint / file_names.MARKER
    content = untrusted_files.read_json(path)
    if content is None:
        return None
    if content.get("complete") is False:
        return Marker(complete=False)
    sizes, hashes, origin = content.get("files"), content.get("hashes", {}), content.get("origin", {})
    if content.get("complete") is not True or not _is_list(sizes, int) or not _is_list(hashes, str):
        raise untrusted_files.broken(path, "is damaged: no list of files")
    return Marker(True, _origin(path, origin), dict(sizes or {}), dict(hashes))


def _is_list(value_by_name: Any, kind: type) -> bool:
    """Whether it maps names of files inside the folder to values of `kind`."""
    return isinstance(value_by_name, dict) and all(
        type(value) is kind and not Path(name).is_absolute() and ".." not in Path(name).parts and "\0" not in name
        for name, value in value_by_name.items()
    )


def _origin(path: Path, content: Any) -> Origin | None:
    if not content:
        return None
    try:
        origin = Origin(**content)
        whole = type(origin.ranks) is type(origin.rows_per_step) is int and isinstance(origin.engine, str)
        groups = [origin.settings, *(part["settings"] for part in origin.before)]
        plain = all(isinstance(values, dict) for part in groups for values in part.values())
        steps = all(type(part["last_step"]) is int for part in origin.before)
    except (TypeError, KeyError, AttributeError) as error:
        raise untrusted_files.broken(path, "is damaged: what it says of the run") from error
    if not (whole and plain and steps):
        raise untrusted_files.broken(path, "is damaged: what it says of the run")
    return origin


ITS_END = "its end"
"""The missing part of a checkpoint whose run ended while it was written."""


def lacking(checkpoint: Path, needed: Callable[[str], bool] = bool) -> dict[str, int] | None:
    """The `needed` files that are missing or have another size than in the marker, with the marker's size.

    None without a marker. Resume, deletion, export and the linter all judge a marked checkpoint by this function.
    """
    marker = read(checkpoint)
    if marker is None:
        return None
    if not marker.complete:
        return {ITS_END: 0}
    return {name: size for name, size in marker.sizes.items() if needed(name) and _size(checkpoint / name) != size}


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1


def flaw(checkpoint: Path) -> str:
    """Why a checkpoint is half-written or damaged, judged by sizes; empty if it is complete."""
    try:
        return _flaw(checkpoint)
    except UserError as error:
        return error.what.removeprefix(f"{checkpoint}/")


def unfinished(folder: Path) -> tuple[str, ...]:
    """Why a folder's weights are half-written or damaged, for a reader of weights; empty if they are whole.

    The optimizer may be deleted. A folder with weights alone passes: it may come from any program.
    """
    try:
        lacks = lacking(folder, lambda name: not name.startswith(file_names.SPARED))
    except UserError as error:
        return (f"a marker that can be read: {error.what}",)
    if lacks is not None:
        return tuple(f"{name} ({size:,} bytes)" if name != ITS_END else name for name, size in lacks.items())
    return (file_names.TRAINER_STATE,) if _is_trainers(folder) and not has_trainer_state(folder) else ()


def _is_trainers(folder: Path) -> bool:
    """Whether Trainer wrote it, unlike `Accelerator.save_state` or an export, which write no `trainer_state.json`."""
    state = (file_names.SCHEDULER, f"{file_names.RNG_STATE}*", f"{file_names.OPTIMIZER}*")
    others = (f"{file_names.RANDOM_STATES}_*", file_names.REPORT)
    return (
        re.fullmatch(rf"{file_names.CHECKPOINT}\d+", folder.name) is not None
        and any(any(folder.glob(name)) for name in state)
        and not any(any(folder.glob(name)) for name in others)
    )


def lacking_to_resume(checkpoint: Path, parts: Parts) -> list[str]:
    """The missing parts that Trainer would start anew, in words; DeepSpeed keeps all of them in its own folder."""
    if by_deepspeed(checkpoint):
        folder = checkpoint / (deepspeed.latest(checkpoint) or "")
        return [] if any(folder.glob(file_names.ZERO_MODELS)) else ["model weights"]
    words = {file_names.OPTIMIZER: "optimizer state", file_names.SCHEDULER: f"schedule ({file_names.SCHEDULER})"}
    weighed = parts.hub or by_fsdp(checkpoint, parts)
    return ([] if weighed else ["model weights"]) + [words[name] for name in parts.new_state]


def by_deepspeed(checkpoint: Path) -> bool:
    return (checkpoint / file_names.LATEST).is_file()


def by_fsdp(checkpoint: Path, parts: Parts) -> bool:
    """Whether it has weights as Accelerate stores them under FSDP."""
    return parts.sharded or parts.full or any(checkpoint.glob(file_names.LOCAL_MODELS))


def is_whole_dcp(folder: Path) -> bool:
    """Whether a distributed checkpoint of torch is complete: `.metadata` is written after all ranks' parts."""
    return (folder / file_names.DCP_METADATA).is_file()


def has_trainer_state(checkpoint: Path) -> bool:
    """Whether the file that Trainer writes last can be read: after an early end it is missing, cut short or empty."""
    try:
        return bool(_trainer_state(checkpoint))
    except UserError:
        return False


def _trainer_state(checkpoint: Path) -> dict[str, Any] | None:
    return untrusted_files.read_json(checkpoint / file_names.TRAINER_STATE, most_values=MOST_LOGGED)


def _flaw(checkpoint: Path) -> str:
    lacks = lacking(checkpoint)
    if lacks is not None:
        return next((_of_size(checkpoint / name, size) for name, size in lacks.items()), "")
    if not _trainer_state(checkpoint):
        return f"{file_names.TRAINER_STATE}, which Trainer writes last, is missing or empty"
    sharded = (
        checkpoint / name
        for name in (file_names.SHARDED_MODEL, file_names.SHARDED_OPTIMIZER)
        if (checkpoint / name).is_dir()
    )
    cut = [path.name for path in sharded if not is_whole_dcp(path)]
    return f"{cut[0]}/{file_names.DCP_METADATA} is missing" if cut else ""


def damage(checkpoint: Path, needed: Callable[[str], bool] = bool, part: int = 0, of: int = 1) -> str:
    """Names the first `needed` file whose bytes have changed or that is not listed; empty if there is none.

    Each of several ranks reads a `part` of about the same size. Missing files are skipped, and a marker without hashes,
    from an earlier version, can't show changed bytes.
    """
    marker = read(checkpoint)
    if marker is None:
        return ""
    if extra := next(filter(needed, _unlisted(checkpoint, marker)), ""):
        return f"{extra} is not in the list of {file_names.MARKER}"
    names = [name for name in marker.hashes if needed(name) and (checkpoint / name).exists()]
    hashes = hashes_of(checkpoint, _share(names, marker.sizes, part, of))
    wrong = sorted(name for name, hashed in hashes.items() if hashed != marker.hashes[name])
    return f"{wrong[0]} holds other bytes than were written" if wrong else ""


def _unlisted(checkpoint: Path, marker: Marker) -> list[str]:
    """The checkpoint's own files that the marker doesn't list.

    Files of a rank are skipped if the marker lists other ranks' only: they were on another machine's disk.
    """
    listed = marker.sizes.keys() | marker.hashes.keys()
    ranks = {rank for name in listed if (rank := _rank_in(name))}
    extra = [name for name in _sizes(checkpoint) if name.startswith(file_names.OF_CHECKPOINTS) and name not in listed]
    return [name for name in extra if not (ranks and (rank := _rank_in(name)) and rank not in ranks)]


def _share(names: Iterable[str], sizes: Mapping[str, int], part: int, of: int) -> list[str]:
    """The names in one part; the largest file first, each goes to the part with the fewest bytes."""
    loads, mine = [0] * of, []
    for name in sorted(names, key=lambda name: (-sizes.get(name, 0), name)):
        least = loads.index(min(loads))
        loads[least] += sizes.get(name, 0) + 1
        if least == part:
            mine.append(name)
    return mine


def _of_size(path: Path, size: int) -> str:
    if path.name == ITS_END:
        return "its run ended while it was written"
    return f"{path.name} has {_size(path):,} of {size:,} bytes" if path.is_file() else f"{path.name} is missing"


def choose(run: Path, among: Sequence[Path] | None = None, wrong: Callable[[Path], str] = flaw) -> Choice:
    """The complete checkpoint-N with the highest number; Trainer itself may choose a half-written one.

    `among`: the run's checkpoints, oldest first. `wrong` returns why one can't be used; empty: it can.
    """
    skipped: dict[Path, str] = {}
    for checkpoint in reversed(file_names.checkpoints(run) if among is None else among):
        if not (why := wrong(checkpoint)):
            return Choice(checkpoint, skipped)
        skipped[checkpoint] = why
    return Choice(None, skipped)


def origin_of(checkpoint: Path) -> Origin | None:
    marker = read(checkpoint)
    return marker.origin if marker else None


def size_bytes(checkpoint: Path) -> int:
    return sum(path.stat().st_size for path in _files(checkpoint))


def retire(run: Path, keep: int | None, best: str | None) -> None:
    """Deletes checkpoints before the newest complete one: half-written ones, and complete ones beyond `keep`.

    The `best` one stays, and counts. Nothing is deleted without `keep`, or if none is complete.
    """
    for old in run.glob(f".{file_names.CHECKPOINT}*.old"):
        if not (run / old.stem[1:]).exists():  # of a run that was killed while it deleted
            _remove(old)
    checkpoints = file_names.checkpoints(run)
    complete = [path for path in checkpoints if not flaw(path)]
    if not keep or keep < 1 or not complete:
        return
    kept = {path for path in complete if best and path.name == Path(best).name} | {complete[-1]}
    for path in reversed(complete):
        if len(kept) < keep:
            kept.add(path)
    for path in checkpoints[: checkpoints.index(complete[-1])]:
        if path not in kept:
            os.replace(path, _aside(path))  # a folder that is partly deleted must not look like a checkpoint
            _remove(_aside(path))


def _aside(checkpoint: Path) -> Path:
    return checkpoint.with_name(f".{checkpoint.name}.old")


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]
