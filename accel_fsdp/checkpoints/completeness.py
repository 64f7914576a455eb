"""Decides which checkpoints are complete, which one a resume takes, and which are deleted.

All other modules ask this one: a resume needs all of a checkpoint (`flaw`, then `lacking_to_resume`), a reader of the
weights only needs complete weights (`unfinished`).

`checkpoint-N/complete.json` marks a folder as being written, from before its first file until all files are on disk;
then one rename replaces its content with the list of their sizes and hashes. A folder without a marker was written by
plain Trainer, and is complete if it has the files that Trainer and torch write last.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from accel_fsdp import atomic_files, untrusted_files
from accel_fsdp.checkpoints import file_names, marker
from accel_fsdp.errors import UserError

ITS_END = "its end"
"""The missing part of a checkpoint whose run ended while it was written."""
ASIDE = f".{file_names.CHECKPOINT}*.old"


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
    _put_back(checkpoint)
    if not flaw(checkpoint):
        os.replace(checkpoint, _aside(checkpoint))
    _remove(checkpoint)
    atomic_files.write_text(checkpoint / file_names.MARKER, marker.UNFINISHED)


def seal(checkpoint: Path, origin: marker.Origin, hashes: Mapping[str, str] | None = None) -> None:
    """Declares the checkpoint complete, once all its files are on disk; call when every rank has written its files.

    `hashes`: the hashes of all files, if the ranks have computed them; otherwise they are computed here.
    """
    atomic_files.sync_folder(checkpoint)
    sizes = marker.sizes_of(checkpoint)
    digests = marker.hashes_of(checkpoint, sizes) if hashes is None else dict(hashes)
    content = {"complete": True, "origin": asdict(origin), "files": sizes, "hashes": digests}
    atomic_files.write_text(checkpoint / file_names.MARKER, json.dumps(content, indent=1, sort_keys=True))
    atomic_files.sync_names(checkpoint.parent)
    _remove(_aside(checkpoint))


def abandon(checkpoint: Path) -> None:
    """Removes a half-written checkpoint, and restores the complete one of the same step that `begin` moved."""
    if flaw(checkpoint):
        _remove(checkpoint)
    _put_back(checkpoint)


def put_back(run: Path) -> None:
    """Restores each complete checkpoint that a killed run left aside; call before one is chosen, while none is saved.

    Such a run was writing the same step again, or had just begun to delete it.
    """
    for aside in run.glob(ASIDE):
        _put_back(run / aside.stem[1:])


def _put_back(checkpoint: Path) -> None:
    aside = _aside(checkpoint)
    if flaw(checkpoint) and not flaw(aside):
        _remove(checkpoint)
        os.replace(aside, checkpoint)
    _remove(aside)


def lacking(checkpoint: Path, needed: Callable[[str], bool] = bool) -> dict[str, str] | None:
    """The `needed` files that are missing or have another size than in the marker, each with its bytes as text.

    None without a marker. Resume, deletion, export and the linter all judge a marked checkpoint by this function.
    """
    written = marker.read(checkpoint)
    if written is None:
        return None
    if not written.complete:
        return {ITS_END: ""}
    lacks = {}
    for name, size in written.sizes.items():
        there = (checkpoint / name).stat().st_size if (checkpoint / name).is_file() else -1
        if needed(name) and there != size:
            lacks[name] = f"{size:,} bytes" if there < 0 else f"has {there:,} of {size:,} bytes"
    return lacks


def flaw(checkpoint: Path) -> str:
    """Why a checkpoint is half-written or damaged, judged by sizes; empty if it is complete."""
    try:
        lacks = lacking(checkpoint)
    except UserError as error:
        return error.what.removeprefix(f"{checkpoint}/")
    if lacks is None:
        return _flaw_without_marker(checkpoint)
    if ITS_END in lacks:
        return "its run ended while it was written"
    return next((f"{Path(name).name} {what if 'has' in what else 'is missing'}" for name, what in lacks.items()), "")


def _flaw_without_marker(checkpoint: Path) -> str:
    if not _trainer_state(checkpoint):
        return f"{file_names.TRAINER_STATE}, which Trainer writes last, is missing or damaged"
    sharded = (checkpoint / file_names.SHARDED_MODEL, checkpoint / file_names.SHARDED_OPTIMIZER)
    incomplete = [path.name for path in sharded if path.is_dir() and not is_whole_dcp(path)]
    return f"{incomplete[0]}/{file_names.DCP_METADATA} is missing" if incomplete else ""


def unfinished(folder: Path) -> tuple[str, ...]:
    """Why a folder's weights are half-written or damaged, for a reader of weights; empty if they are whole.

    The optimizer may be deleted. A folder with weights alone passes: it may come from any program.
    """
    try:
        lacks = lacking(folder, file_names.is_exported)
    except UserError as error:
        return (f"a marker that can be read: {error.what}",)
    if lacks is not None:
        return tuple(f"{name} ({what})" if what else name for name, what in lacks.items())
    return (file_names.TRAINER_STATE,) if _is_of_trainer(folder) and not _trainer_state(folder) else ()


def _is_of_trainer(folder: Path) -> bool:
    """Whether Trainer wrote a folder. `Accelerator.save_state` and an export write no `trainer_state.json`."""
    names = (file_names.SCHEDULER, f"{file_names.RNG_STATE}*")
    return file_names.step(folder.name) >= 0 and any(any(folder.glob(name)) for name in names)


def lacking_to_resume(checkpoint: Path) -> list[str]:
    """The missing parts that Trainer would reset; DeepSpeed keeps all of them in a separate folder."""
    if by_deepspeed(checkpoint):
        folder = checkpoint / (deepspeed_latest(checkpoint) or "")
        return [] if any(folder.glob(file_names.ZERO_MODELS)) else ["model weights"]
    names = [path.name for path in checkpoint.iterdir() if path.resolve().is_relative_to(checkpoint.resolve())]
    has_weights = bool(state_dict_type(checkpoint)) or any(
        Path(name).suffix in file_names.READABLE and not name.startswith(file_names.STATE) for name in names
    )
    parts = {
        "model weights": has_weights,
        "optimizer state": any(name.startswith(file_names.OPTIMIZER) for name in names),
        f"schedule ({file_names.SCHEDULER})": file_names.SCHEDULER in names,
    }
    return [part for part, is_there in parts.items() if not is_there]


def by_deepspeed(checkpoint: Path) -> bool:
    return (checkpoint / file_names.LATEST).is_file()


def deepspeed_latest(checkpoint: Path) -> str | None:
    """The folder that DeepSpeed's file `latest` names; None without such a file: `latest` may link to a checkpoint."""
    path = checkpoint / file_names.LATEST
    content = None if path.is_dir() else untrusted_files.read_bytes(path)
    return None if content is None else content.decode(errors="replace").strip()


def state_dict_type(checkpoint: Path) -> str:
    """Accelerate's name of how FSDP's weights are stored; empty if they aren't."""
    if any(checkpoint.glob(f"{file_names.TORCH_STEM}*/{file_names.DCP_PARTS}")):
        return "SHARDED_STATE_DICT"
    if (checkpoint / file_names.FULL_MODEL).is_file():
        return "FULL_STATE_DICT"
    return "LOCAL_STATE_DICT" if any(checkpoint.glob(file_names.LOCAL_MODELS)) else ""


def is_whole_dcp(folder: Path) -> bool:
    """Whether a distributed checkpoint of torch is complete: `.metadata` is written after all ranks' parts."""
    return (folder / file_names.DCP_METADATA).is_file()


def logged(checkpoint: Path) -> list[dict[str, Any]]:
    """What Trainer logged up to a checkpoint: entries with their `step`; empty where it can't be read."""
    log = _trainer_state(checkpoint).get("log_history")
    entries = log if isinstance(log, list) else []
    return [entry for entry in entries if isinstance(entry, dict) and type(entry.get("step")) is int]


def step_of(checkpoint: Path) -> int:
    """The step that Trainer counts in a checkpoint; 0 if it doesn't say."""
    step = _trainer_state(checkpoint).get("global_step")
    return step if type(step) is int else 0


def _trainer_state(checkpoint: Path) -> dict[str, Any]:
    """The file that Trainer writes last; empty if it is missing, cut short or empty, as after an early end."""
    try:
        return untrusted_files.read_json(checkpoint / file_names.TRAINER_STATE)
    except UserError:
        return {}


def choose(run: Path, among: Sequence[Path] | None = None, flaw_of: Callable[[Path], str] = flaw) -> Choice:
    """The complete checkpoint-N with the highest number; Trainer itself may choose a half-written one.

    `among`: the run's checkpoints, oldest first. `flaw_of` returns why a checkpoint can't be used, or an empty text.
    """
    skipped: dict[Path, str] = {}
    for checkpoint in reversed(file_names.checkpoints(run) if among is None else among):
        if not (why := flaw_of(checkpoint)):
            return Choice(checkpoint, skipped)
        skipped[checkpoint] = why
    return Choice(None, skipped)


def retire(run: Path, keep: int | None, best: str | None) -> None:
    """Deletes checkpoints before the newest complete one: half-written ones, and complete ones beyond `keep`.

    The `best` one stays, and counts. Nothing is deleted without `keep`, or if none is complete.
    """
    for old in run.glob(ASIDE):
        if not (run / old.stem[1:]).exists() and flaw(old):  # left by a run that was killed during a deletion
            _remove(old)
    names = [path.name for path in file_names.checkpoints(run)]
    for name in outdated(names, lambda name: not flaw(run / name), keep, best):
        delete(run / name)


def outdated(names: Sequence[str], is_complete: Callable[[str], bool], keep: int | None, best: str | None) -> list[str]:
    """Those checkpoints of a run, given the oldest first, that `retire` deletes."""
    if not keep or keep < 1 or not (complete := [name for name in names if is_complete(name)]):
        return []
    to_keep = {name for name in complete if best and name == Path(best).name} | {complete[-1]}
    for name in reversed(complete):
        if len(to_keep) < keep:
            to_keep.add(name)
    return [name for name in names[: names.index(complete[-1])] if name not in to_keep]


def delete(checkpoint: Path) -> None:
    aside = _aside(checkpoint)
    _remove(aside)
    os.replace(checkpoint, aside)
    atomic_files.write_text(aside / file_names.MARKER, marker.UNFINISHED)  # what is partly deleted isn't put back
    _remove(aside)


def _aside(checkpoint: Path) -> Path:
    return checkpoint.with_name(f".{checkpoint.name}.old")


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
