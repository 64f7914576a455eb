"""Which checkpoints are complete, as their own markers say; which one a resume takes, and which are deleted.

`checkpoint-N/complete.json` says that the folder is being written, from before the first of the other files until all
of them are on disk; then one rename puts the list of their sizes in its place. A folder without marker was written by
plain Trainer and is judged by what Trainer and torch write last.
"""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from accel_fsdp import files, weights

MARKER = "complete.json"
SHARDED = ("pytorch_model_fsdp_0", "optimizer_0")


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
class Choice:
    """The newest complete checkpoint of a run, and what the newer ones lack."""

    newest: Path | None
    skipped: dict[Path, str] = field(default_factory=dict)


def begin(checkpoint: Path) -> None:
    """Makes the folder, empty but for a marker that says it isn't complete; call before any rank writes into it.

    A complete checkpoint of the same step stays beside it until `seal`.

    Raises:
        UserError: the folder can't be written.
    """
    if checkpoint.exists() and not flaw(checkpoint):
        _remove(_aside(checkpoint))
        os.replace(checkpoint, _aside(checkpoint))
    _remove(checkpoint)
    files.write_text(checkpoint / MARKER, json.dumps({"complete": False}))


def seal(checkpoint: Path, origin: Origin) -> None:
    """Declares the checkpoint complete, once all its files are on disk; call when every rank has written its own.

    Raises:
        UserError: the marker can't be written. The checkpoint then counts as half-written.
    """
    files.sync_folder(checkpoint)
    found = {str(path.relative_to(checkpoint)): path.stat().st_size for path in _files(checkpoint)}
    found.pop(MARKER)
    content = {"complete": True, "origin": asdict(origin), "files": found}
    files.write_text(checkpoint / MARKER, json.dumps(content, indent=1, sort_keys=True))
    files.sync_names(checkpoint.parent)
    _remove(_aside(checkpoint))


def flaw(checkpoint: Path) -> str:
    """What makes a checkpoint half-written; empty where it is complete."""
    if (checkpoint / MARKER).exists():
        marker = weights.read_json(checkpoint / MARKER)
        if not marker.get("complete"):
            return "its run ended while it was written"
        return next(filter(None, (_wrong_size(checkpoint / name, size) for name, size in marker["files"].items())), "")
    if not weights.read_json(checkpoint / "trainer_state.json"):
        return "trainer_state.json, which Trainer writes last, is missing or cut short"
    sharded = (checkpoint / name for name in SHARDED if (checkpoint / name).is_dir())
    cut = [path.name for path in sharded if not (path / ".metadata").is_file()]
    return f"{cut[0]}/.metadata is missing" if cut else ""


def _wrong_size(path: Path, size: int) -> str:
    if not path.is_file():
        return f"{path.name} is missing"
    found = path.stat().st_size
    return f"{path.name} has {found:,} of {size:,} bytes" if found != size else ""


def choose(run: Path) -> Choice:
    """The complete checkpoint-N with the highest number, where Trainer would take a half-written one."""
    skipped: dict[Path, str] = {}
    for checkpoint in reversed(files.checkpoints(run)):
        if not (why := flaw(checkpoint)):
            return Choice(checkpoint, skipped)
        skipped[checkpoint] = why
    return Choice(None, skipped)


def origin_of(checkpoint: Path) -> Origin | None:
    """What the marker says about the run; None without one."""
    found: dict[str, Any] = weights.read_json(checkpoint / MARKER).get("origin", {})
    return Origin(**found) if found else None


def size_bytes(checkpoint: Path) -> int:
    """What the checkpoint takes on disk."""
    return sum(path.stat().st_size for path in _files(checkpoint))


def retire(run: Path, keep: int | None, best: str | None) -> None:
    """Deletes what lies before the newest complete checkpoint: half-written ones, and complete ones beyond `keep`.

    The `best` one stays, and counts. Nothing is deleted where none is complete, or without `keep`.
    """
    for old in run.glob(".checkpoint-*.old"):
        if not (run / old.stem[1:]).exists():  # of a run that was killed while it deleted
            _remove(old)
    found = files.checkpoints(run)
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
