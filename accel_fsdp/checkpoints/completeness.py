"""Which checkpoints are complete, as their own markers say; which one a resume takes, and which are deleted.

The one judge: a resume needs all of a checkpoint (`flaw`, then `lacking_to_resume`), a reader of the weights only that
they are whole (`unfinished`).

`checkpoint-N/complete.json` says that the folder is being written, from before the first of the other files until all
of them are on disk; then one rename puts the list of their sizes and hashes in its place. A folder without marker was
written by plain Trainer and is judged by what Trainer and torch write last.
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
"""Numbers in `trainer_state.json`, which logs all steps."""
HASHED_TOGETHER = 4
HASHED_BYTES = 1 << 22


@dataclass(frozen=True)
class Origin:
    """The run that wrote a checkpoint, as far as one that resumes it has to be like it.

    `engine` is FSDP, DDP (one process too) or ZeRO with its stage; `rows_per_step` are those of all ranks in one step
    of the optimizer. Zeros are unknown.
    """

    engine: str
    ranks: int = 0
    rows_per_step: int = 0
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What it was trained with, as `lineage.settings` names it; empty: unknown."""
    before: Sequence[Mapping[str, Any]] = ()
    """Earlier stretches of the run that had other settings: the last step of each, and its settings."""


@dataclass(frozen=True)
class Marker:
    """What `complete.json` says: sizes and hashes by the names of the files, from the checkpoint's folder on."""

    complete: bool
    origin: Origin | None = None
    sizes: dict[str, int] = field(default_factory=dict)
    hashes: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Parts:
    """Which parts of a run a folder holds, by the names in it.

    `sharded` and `full` say in which way FSDP's model weights are stored, `hub` that there are Hugging Face weights.
    `by_accelerator` says that `Accelerator.save_state` wrote it, `exported` that `accel-fsdp export` did: neither
    writes a `trainer_state.json`.
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
        held = self.sharded or self.full or self.optimizer or self.scheduler or self.trainer_state
        return held and not self.exported

    @property
    def is_cut_short(self) -> bool:
        """Whether a resume would miss what Trainer writes last."""
        return self.is_checkpoint and not self.trainer_state and not self.by_accelerator

    @property
    def new_state(self) -> tuple[str, ...]:
        """Names of what isn't there beside the weights: Trainer starts it anew, without a word."""
        there = {file_names.OPTIMIZER: self.optimizer, file_names.SCHEDULER: self.scheduler}
        return tuple(name for name, held in there.items() if not held)


@dataclass(frozen=True)
class Choice:
    """The newest complete checkpoint of a run, and what the newer ones lack."""

    newest: Path | None
    skipped: dict[Path, str] = field(default_factory=dict)


def begin(checkpoint: Path) -> None:
    """Makes the folder, empty but for a marker that says it isn't complete; call before any rank writes into it.

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

    `hashes` are those of all files, where the ranks have taken them; else they are taken now.

    Raises:
        UserError: the marker can't be written. The checkpoint then counts as half-written.
    """
    atomic_files.sync_folder(checkpoint)
    found = _sizes(checkpoint)
    taken = hashes_of(checkpoint, found) if hashes is None else dict(hashes)
    content = {"complete": True, "origin": asdict(origin), "files": found, "hashes": taken}
    atomic_files.write_text(checkpoint / file_names.MARKER, json.dumps(content, indent=1, sort_keys=True))
    atomic_files.sync_names(checkpoint.parent)
    _remove(_aside(checkpoint))


def abandon(checkpoint: Path) -> None:
    """Removes a half-written checkpoint; a complete one of the same step that `begin` moved is in its place again."""
    if flaw(checkpoint):
        _remove(checkpoint)
    aside = _aside(checkpoint)
    if not checkpoint.exists() and not flaw(aside):
        os.replace(aside, checkpoint)


def _sizes(checkpoint: Path) -> dict[str, int]:
    found = {str(path.relative_to(checkpoint)): path.stat().st_size for path in _files(checkpoint)}
    found.pop(file_names.MARKER, None)
    return found


def own_hashes(checkpoint: Path, rank: int, ranks: int) -> dict[str, str]:
    """Hashes of the files that this rank wrote, which the system still has in memory: those with its number in their
    names, and on the first rank all others.
    """
    numbered = {name: int(writer) % ranks for name in _sizes(checkpoint) if (writer := _rank_in(name))}
    return hashes_of(checkpoint, [name for name in _sizes(checkpoint) if numbered.get(name, 0) == rank])


def _rank_in(name: str) -> str:
    found = file_names.OF_RANK.search(name)
    return found[1] if found else ""


def hashes_of(checkpoint: Path, names: Iterable[str]) -> dict[str, str]:
    names = list(names)
    with ThreadPoolExecutor(HASHED_TOGETHER) as pool:
        return dict(zip(names, pool.map(lambda name: _hash(checkpoint / name, checkpoint), names), strict=True))


def _hash(path: Path, within: Path) -> str:
    import xxhash

    found, block = xxhash.xxh3_128(), memoryview(bytearray(HASHED_BYTES))
    with untrusted_files.opened(path, within) as file:
        while count := file.readinto(block):  # type: ignore[attr-defined]
            found.update(block[:count])
    return found.hexdigest()


def read(checkpoint: Path) -> Marker | None:
    """The marker; None where there is none."""
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


def _is_list(found: Any, kind: type) -> bool:
    """Names of files inside the folder, and something of `kind` for each."""
    return isinstance(found, dict) and all(
        type(value) is kind and not Path(name).is_absolute() and ".." not in Path(name).parts and "\0" not in name
        for name, value in found.items()
    )


def _origin(path: Path, found: Any) -> Origin | None:
    if not found:
        return None
    try:
        origin = Origin(**found)
        whole = type(origin.ranks) is type(origin.rows_per_step) is int and isinstance(origin.engine, str)
        groups = [origin.settings, *(one["settings"] for one in origin.before)]
        plain = all(isinstance(values, dict) for one in groups for values in one.values())
        steps = all(type(one["last_step"]) is int for one in origin.before)
    except (TypeError, KeyError, AttributeError) as error:
        raise untrusted_files.broken(path, "is damaged: what it says of the run") from error
    if not (whole and plain and steps):
        raise untrusted_files.broken(path, "is damaged: what it says of the run")
    return origin


ITS_END = "its end"
"""What a checkpoint lacks whose run ended while it was written."""


def lacking(checkpoint: Path, needed: Callable[[str], bool] = bool) -> dict[str, int] | None:
    """The files that are missing or have another size than the marker says, of those `needed`, with that size.

    None where there is no marker. The one judgement of a marked checkpoint: resume, deletion, export and the linter ask
    it.
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
    """What makes a checkpoint half-written or damaged, as far as sizes tell; empty where it is complete."""
    try:
        return _flaw(checkpoint)
    except UserError as error:
        return error.what.removeprefix(f"{checkpoint}/")


def unfinished(folder: Path) -> tuple[str, ...]:
    """What tells one who reads the weights that a folder is half-written or damaged; empty where it is whole.

    The optimizer may be deleted. Whatever holds no more than weights passes: who wrote it can't be known.
    """
    try:
        lacks = lacking(folder, lambda name: not name.startswith(file_names.SPARED))
    except UserError as error:
        return (f"a marker that can be read: {error.what}",)
    if lacks is not None:
        return tuple(f"{name} ({size:,} bytes)" if name != ITS_END else name for name, size in lacks.items())
    return (file_names.TRAINER_STATE,) if _is_trainers(folder) and not has_trainer_state(folder) else ()


def _is_trainers(folder: Path) -> bool:
    """Whether Trainer began it, and not `Accelerator.save_state` or an export, which write no `trainer_state.json`."""
    state = (file_names.SCHEDULER, f"{file_names.RNG_STATE}*", f"{file_names.OPTIMIZER}*")
    others = (f"{file_names.RANDOM_STATES}_*", file_names.REPORT)
    return (
        re.fullmatch(rf"{file_names.CHECKPOINT}\d+", folder.name) is not None
        and any(any(folder.glob(name)) for name in state)
        and not any(any(folder.glob(name)) for name in others)
    )


def lacking_to_resume(checkpoint: Path, held: Parts) -> list[str]:
    """The parts, in words, without which Trainer would begin anew; DeepSpeed keeps all of them in its own folder."""
    if by_deepspeed(checkpoint):
        folder = checkpoint / (deepspeed.latest(checkpoint) or "")
        return [] if any(folder.glob(file_names.ZERO_MODELS)) else ["model weights"]
    words = {file_names.OPTIMIZER: "optimizer state", file_names.SCHEDULER: f"schedule ({file_names.SCHEDULER})"}
    weighed = held.hub or by_fsdp(checkpoint, held)
    return ([] if weighed else ["model weights"]) + [words[name] for name in held.new_state]


def by_deepspeed(checkpoint: Path) -> bool:
    return (checkpoint / file_names.LATEST).is_file()


def by_fsdp(checkpoint: Path, held: Parts) -> bool:
    """Whether it has weights as Accelerate stores them under FSDP."""
    return held.sharded or held.full or any(checkpoint.glob(file_names.LOCAL_MODELS))


def is_whole_dcp(folder: Path) -> bool:
    """Whether all ranks have written their parts of one of torch's distributed checkpoints: `.metadata` comes last."""
    return (folder / file_names.DCP_METADATA).is_file()


def has_trainer_state(checkpoint: Path) -> bool:
    """Whether the file that Trainer writes last is there and holds something: ended early, it is cut or empty."""
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


def damage(checkpoint: Path, wanted: Callable[[str], bool] = bool, part: int = 0, of: int = 1) -> str:
    """The first file that holds other bytes than were written, or is not listed, of those `wanted`; empty where all are
    as they were.

    Each of several ranks reads a `part` of about the same size. Files that aren't there are passed over, and a marker
    without hashes, of an earlier version, tells nothing of bytes.
    """
    marker = read(checkpoint)
    if marker is None:
        return ""
    if extra := next(filter(wanted, _unlisted(checkpoint, marker)), ""):
        return f"{extra} is not in the list of {file_names.MARKER}"
    names = [name for name in marker.hashes if wanted(name) and (checkpoint / name).exists()]
    found = hashes_of(checkpoint, _share(names, marker.sizes, part, of))
    wrong = sorted(name for name, one in found.items() if one != marker.hashes[name])
    return f"{wrong[0]} holds other bytes than were written" if wrong else ""


def _unlisted(checkpoint: Path, marker: Marker) -> list[str]:
    """The checkpoint's own files that the marker doesn't know.

    Those of a rank of which it has no file at all, where it has some of ranks, lay on another machine's disk.
    """
    listed = marker.sizes.keys() | marker.hashes.keys()
    ranks = {rank for name in listed if (rank := _rank_in(name))}
    extra = [name for name in _sizes(checkpoint) if name.startswith(file_names.OF_CHECKPOINTS) and name not in listed]
    return [name for name in extra if not (ranks and (rank := _rank_in(name)) and rank not in ranks)]


def _share(names: Iterable[str], sizes: Mapping[str, int], part: int, of: int) -> list[str]:
    """Every name in one part; largest first, each goes to the part that has least."""
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
    """The complete checkpoint-N with the highest number, where Trainer would take a half-written one.

    `among`: those of the run, oldest first. `wrong` says why one can't be taken; empty: it can.
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
    """Deletes what lies before the newest complete checkpoint: half-written ones, and complete ones beyond `keep`.

    The `best` one stays, and counts. Nothing is deleted where none is complete, or without `keep`.
    """
    for old in run.glob(f".{file_names.CHECKPOINT}*.old"):
        if not (run / old.stem[1:]).exists():  # of a run that was killed while it deleted
            _remove(old)
    found = file_names.checkpoints(run)
    complete = [path for path in found if not flaw(path)]
    if not keep or keep < 1 or not complete:
        return
    wanted = {path for path in complete if best and path.name == Path(best).name} | {complete[-1]}
    for path in reversed(complete):
        if len(wanted) < keep:
            wanted.add(path)
    for path in found[: found.index(complete[-1])]:
        if path not in wanted:
            os.replace(path, _aside(path))  # a folder that is partly deleted must not look like a checkpoint
            _remove(_aside(path))


def _aside(checkpoint: Path) -> Path:
    return checkpoint.with_name(f".{checkpoint.name}.old")


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]
