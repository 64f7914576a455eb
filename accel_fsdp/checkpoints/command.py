"""The command `accel-fsdp checkpoints`: those of a run in one table; deletes some of them."""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

from accel_fsdp import atomic_files, console
from accel_fsdp.checkpoints import completeness, discover, file_names, marker
from accel_fsdp.command_line import arg, positional
from accel_fsdp.errors import UsageError, UserError, did_you_mean
from accel_fsdp.units import counted, gb_or_mb


@dataclass(frozen=True)
class CheckpointsCommand:
    run: Annotated[Path, positional("A run's folder, --output_dir of the training.", "RUN")]
    delete: Annotated[str | None, arg("Delete the checkpoints of these steps: 10,20.", "STEPS", hint=" ")] = None
    dry_run: Annotated[bool, arg("Only show what would be deleted.")] = False
    json: Annotated[bool, arg("The table as JSON.")] = False


@dataclass(frozen=True)
class Listed:
    """A checkpoint of a run.

    `why` says what it lacks, for a resume; empty if it is complete. `loss` is the last one of training up to its step,
    and `eval_loss` the held-out one at its step; None where none was logged. `written` is the time of its last file.
    """

    step: int
    folder: Path
    why: str
    kind: str
    engine: str
    ranks: int
    size_bytes: int
    written: datetime
    loss: float | None
    eval_loss: float | None
    is_best: bool = False
    is_newest: bool = False


def show(command: CheckpointsCommand) -> int:
    """Shows or deletes; returns 0.

    Raises:
        UserError: there is no such checkpoint, or none to resume from would be left.
    """
    found = checkpoints(command.run)
    if not found:
        raise _nothing(command.run)
    chosen = found
    if command.delete is not None:
        chosen = _of_steps(command.run, found, command.delete.split(","))
        _delete(command, found, chosen)
    if command.json:
        rows = [{"complete": not item.why, **asdict(item), "written": item.written.isoformat()} for item in chosen]
        console.put(json.dumps(rows, indent=2, default=str), lines=True)
    elif command.delete is None:
        _put_table(found)
    else:
        for item in chosen:
            console.put(f"{'would be deleted' if command.dry_run else 'deleted'}: {item.folder}")
    return 0


def checkpoints(run: Path) -> list[Listed]:
    """The checkpoints of a run by their steps, complete or not."""
    found = [_listed(folder) for folder in file_names.checkpoints(run)]
    complete = [item for item in found if not item.why]
    rated = [item for item in complete if item.eval_loss is not None]
    best = min(rated, key=lambda item: (item.eval_loss, -item.step), default=None)
    return [replace(item, is_best=item is best, is_newest=bool(complete) and item is complete[-1]) for item in found]


def _listed(folder: Path) -> Listed:
    location = discover.look(folder)
    try:
        origin = marker.origin_of(folder)
        why = completeness.flaw(folder)
        if not why and not any(folder.glob(f"{file_names.RANDOM_STATES}_*")):  # of a loop with Accelerate
            why = "; ".join(f"lacks {part}" for part in completeness.lacking_to_resume(folder))
    except UserError as error:
        origin, why = None, error.what.removeprefix(f"{folder}/")
    stats = [path.stat() for path in marker.files_in(folder)]
    return Listed(
        file_names.step(folder.name),
        folder,
        why,
        location.kind if location else "",
        origin.engine if origin else "",
        origin.ranks if origin else 0,
        sum(file.st_size for file in stats),
        datetime.fromtimestamp(max(file.st_mtime for file in (*stats, folder.stat())), timezone.utc),
        *_losses(folder),
    )


def _losses(folder: Path) -> tuple[float | None, float | None]:
    """The last loss of training up to a checkpoint's step, and the held-out one at its step."""
    log, step = completeness.logged(folder), file_names.step(folder.name)
    losses = [(entry["step"], entry["loss"]) for entry in log if "loss" in entry and entry["step"] <= step]
    held_out = [entry["eval_loss"] for entry in log if "eval_loss" in entry and entry["step"] == step]
    return max(losses)[1] if losses else None, held_out[-1] if held_out else None


def _nothing(run: Path) -> UserError:
    holds = ", ".join(str(item.folder) for item in discover.listed(run)) if run.is_dir() else ""
    if holds == str(run):
        return UsageError(
            f"{run} is a checkpoint", why="a run has several", fix=f"give the folder of the run: {run.parent}"
        )
    return UsageError(
        f"{run} holds no {file_names.CHECKPOINT}N" if run.is_dir() else f"{run} is not a folder",
        why=f"it holds {holds}" if holds else "there is nothing to list",
        fix="the folder of a run, as given to train/sft.py --output_dir",
    )


def _of_steps(run: Path, found: list[Listed], steps: Sequence[str]) -> list[Listed]:
    """The checkpoints of these steps, in the order of the steps' numbers."""
    known = {str(item.step): item for item in found}
    for step in steps:
        if step not in known:
            raise UsageError(
                f"{run} holds no {file_names.CHECKPOINT}{step}.{did_you_mean(step, known)}",
                why="nothing was done",
                fix=f"one of the steps {', '.join(known)}",
            )
    return [item for step, item in known.items() if step in steps]


def _delete(command: CheckpointsCommand, found: list[Listed], chosen: list[Listed]) -> None:
    complete = [item for item in found if not item.why]
    if complete and all(item in chosen for item in complete):
        newest = complete[-1].folder
        raise UserError(
            f"no complete checkpoint of {command.run} would be left",
            why="nothing to resume from or to export; nothing was deleted",
            fix=f"leave out {newest.name}; or delete the folder itself: rm -r {newest}",
        )
    if not command.dry_run:
        with ExitStack() as stack:
            if any(item.why for item in chosen) and (command.run / atomic_files.RUN_LOCK).exists():
                stack.callback(atomic_files.only_run(command.run).release)  # a run may be writing it
            for item in chosen:
                completeness.delete(item.folder)
    console.say(f"{counted(len(chosen), 'checkpoint')}, {gb_or_mb(sum(i.size_bytes for i in chosen))}", style="cyan")


def _put_table(found: list[Listed]) -> None:
    rows = [
        (
            str(item.step),
            item.why or "complete" + (", newest" if item.is_newest else "") + (", best" if item.is_best else ""),
            f"{item.engine}, {counted(item.ranks, 'rank')}" if item.engine else item.kind or "-",
            gb_or_mb(item.size_bytes),
            item.written.astimezone().strftime("%Y-%m-%d %H:%M"),
            _loss(item.loss),
            _loss(item.eval_loss),
            str(item.folder),
        )
        for item in found
    ]
    titles = ("step", "state", "engine", "size", "written", "loss", "held-out loss", "folder")
    console.show_table(titles, rows, ["yellow" if item.why else "" for item in found], whole=True)


def _loss(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.4g}"
