"""The command `accel-fsdp checkpoints`: those of a run in one table; deletes, moves or compares some of them."""

import json
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

import tyro

from accel_fsdp import atomic_files, console
from accel_fsdp.checkpoints import (
    CheckpointLocation,
    Difference,
    FileReader,
    Store,
    completeness,
    differences,
    discover,
    file_names,
    marker,
    open_checkpoint,
    store,
    summary,
)
from accel_fsdp.errors import UsageError, UserError, did_you_mean
from accel_fsdp.flag_words import arg
from accel_fsdp.units import counted, gb_or_mb, listed

MOST_SHOWN = 20
"""The tensors of a comparison that the table shows, those that changed most."""


@dataclass(frozen=True)
class CheckpointsCommand:
    run: Annotated[
        tyro.conf.Positional[Path],
        arg("A run's folder, --output_dir of the training; or a run in a store: s3://BUCKET/RUN.", "RUN"),
    ]
    delete: Annotated[str | None, arg("Delete the checkpoints of these steps: 10,20.", "STEPS", hint=" ")] = None
    keep_best: Annotated[
        int | None, arg("Delete all but the N of lowest held-out loss, and the newest complete one.", "N", hint=" ")
    ] = None
    diff: Annotated[
        str | None,
        arg("Which weights differ between two checkpoints, by step or folder, and how much.", "A,B", hint=" "),
    ] = None
    push: Annotated[str | None, arg("Upload the newest complete checkpoint to a store.", "URI", hint=" ")] = None
    pull: Annotated[str | None, arg("Fetch the newest complete checkpoint from a store.", "URI", hint=" ")] = None
    step: Annotated[int | None, arg("With --push or --pull: the checkpoint of this step.", "N", hint=" ")] = None
    dry_run: Annotated[bool, arg("Only show what would be deleted.")] = False
    json: Annotated[bool, arg("The table, or the comparison, as JSON.")] = False


@dataclass(frozen=True)
class Listed:
    """A checkpoint of a run.

    `folder` is its path, or its URI in a store. `why` says what it lacks, for a resume; empty if it is complete. `loss`
    is the last one of training up to its step, and `eval_loss` the held-out one at its step; None where none was
    logged. `written` is the time of its last file; None where a store doesn't say.
    """

    step: int
    folder: Path | str
    why: str
    kind: str
    engine: str
    ranks: int
    size_bytes: int
    written: datetime | None
    loss: float | None
    eval_loss: float | None
    is_best: bool = False
    is_newest: bool = False


def show(command: CheckpointsCommand) -> int:
    """Shows, deletes or compares; returns 0.

    Raises:
        UserError: there is no such checkpoint, it can't be read, or none to resume from would be left.
    """
    asked = [flag for flag in ("delete", "keep_best", "diff", "push", "pull") if getattr(command, flag) is not None]
    if len(asked) > 1:
        flags = [f"--{flag.replace('_', '-')}" for flag in asked]
        raise UsageError(
            f"{listed(flags, 'and')} together", why="each is a command of its own", fix=f"{flags[0]} alone"
        )
    if command.step is not None and not {"push", "pull"} & set(asked):
        raise UsageError("--step alone", why="it says which checkpoint to move", fix="--push URI or --pull URI with it")
    uri = store.uri_of(command.run)
    if uri and asked and asked[0] in ("diff", "push", "pull"):
        raise UsageError(
            f"--{asked[0]} with {uri}",
            why="it needs a folder of this machine",
            fix=f"accel-fsdp checkpoints FOLDER --pull {uri}",
        )
    if command.push is not None:
        return _push(command.run, Store(_of_run(command.push, "--push")), command.step)
    if command.pull is not None:
        return _pull(command.run, _of_run(command.pull, "--pull"), command.step)
    if command.diff is not None:
        return _show_differences(command, command.diff)
    found = checkpoints(command.run)
    if not found:
        raise _nothing(command.run)
    if command.delete is not None:
        return _delete(command, found, _of_steps(command.run, found, command.delete.split(",")))
    if command.keep_best is not None:
        return _delete(command, found, _worse(found, command.keep_best))
    _put_table(found, command.json)
    return 0


def checkpoints(run: Path) -> list[Listed]:
    """The checkpoints of a run by their steps, complete or not."""
    if uri := store.uri_of(run):
        place = Store(_of_run(uri, "accel-fsdp checkpoints"))
        with place.reached():
            found = [_stored(place, name) for name in place.checkpoints()]
    else:
        found = [_listed(folder) for folder in file_names.checkpoints(run)]
    complete = [item for item in found if not item.why]
    rated = [item for item in complete if item.eval_loss is not None]
    best = min(rated, key=lambda item: (item.eval_loss, -item.step), default=None)
    return [replace(item, is_best=item is best, is_newest=bool(complete) and item is complete[-1]) for item in found]


def _listed(folder: Path) -> Listed:
    location = discover.look(folder)
    try:
        origin = marker.origin_of(folder)
        why = completeness.flaw(folder) or _lacking(folder)
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


def _stored(place: Store, name: str) -> Listed:
    with place.read(name, (file_names.MARKER, file_names.TRAINER_STATE)) as folder:
        try:
            origin, why = marker.origin_of(folder), place.lacking(name)
        except UserError as error:
            origin, why = None, error.what.removeprefix(f"{folder}/")
        return Listed(
            file_names.step(name),
            f"{place.uri}/{name}",
            why,
            "",
            origin.engine if origin else "",
            origin.ranks if origin else 0,
            sum(place.sizes(name).values()),
            place.written(name),
            *_losses(folder),
        )


def _losses(folder: Path) -> tuple[float | None, float | None]:
    """The last loss of training up to a checkpoint's step, and the held-out one at its step."""
    log, step = completeness.logged(folder), file_names.step(folder.name)
    losses = [(entry["step"], entry["loss"]) for entry in log if "loss" in entry and entry["step"] <= step]
    held_out = [entry["eval_loss"] for entry in log if "eval_loss" in entry and entry["step"] == step]
    return max(losses)[1] if losses else None, held_out[-1] if held_out else None


def _lacking(folder: Path) -> str:
    facts = summary.facts_of(folder)
    if facts.by_accelerator:
        return ""  # what a loop with Accelerate resumes is its own affair
    absent = completeness.lacking_to_resume(folder, facts)
    return f"lacks {listed(absent, 'and')}" if absent else ""


def _of_run(uri: str, flag: str) -> str:
    """The URI of a run, not of a checkpoint in it."""
    run, name = store.split(store.uri_of(uri) or uri)
    if name:
        step = f" --step {file_names.step(name)}" if flag.startswith("--") else ""
        raise UsageError(f"{flag} {uri}", why="the URI of a run is needed", fix=f"{flag} {run}{step}")
    return run


def _push(run: Path, place: Store, step: int | None) -> int:
    folder = completeness.choose(run).newest
    if folder is None:
        raise _nothing(run)
    if step is not None:
        folder = Path(_of_steps(run, checkpoints(run), [str(step)])[0].folder)
    if (why := completeness.flaw(folder)) or not marker.listed(folder):
        raise UserError(
            f"{folder} {f'is not complete: {why}' if why else f'has no {file_names.MARKER}'}",
            why="a store holds only checkpoints that can be told to be whole",
            fix="a checkpoint of train/sft.py that accel-fsdp checkpoints RUN shows as complete",
        )
    size = sum(marker.listed(folder).values())
    with place.reached(), console.progress(f"uploading {folder.name}", size) as moved:
        place.describe(run)
        is_new = place.push(folder, moved)
    console.say(f"{place.uri}/{folder.name}: {gb_or_mb(size) if is_new else 'is there already'}", style="green")
    return 0


def _pull(run: Path, uri: str, step: int | None) -> int:
    place, name = store.named(uri if step is None else f"{uri}/{file_names.CHECKPOINT}{step}")
    if not completeness.flaw(run / name):
        raise UserError(
            f"{run / name} is complete", why="it would be replaced", fix="--delete its step first, or another RUN"
        )
    with place.reached():
        place.pull(name, run)
    console.say(f"{run / name}: from {place.uri}", style="green")
    return 0


def _nothing(run: Path) -> UserError:
    if uri := store.uri_of(run):
        return UserError(
            f"{uri} holds no {file_names.CHECKPOINT}N",
            why="there is nothing to list",
            fix="the URI of a run, as given to train/sft.py --checkpoint_uri",
        )
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
                f"{store.uri_of(run) or run} holds no {file_names.CHECKPOINT}{step}.{did_you_mean(step, known)}",
                why="nothing was done",
                fix=f"one of the steps {', '.join(known)}",
            )
    return [item for step, item in known.items() if step in steps]


def _worse(found: list[Listed], keep: int) -> list[Listed]:
    """All checkpoints but the `keep` complete ones with the lowest held-out loss, and the newest complete one.

    What is newer than that one stays, as its save may be under way.
    """
    if keep < 1:
        raise UsageError(f"--keep-best {keep}", why="nothing would be left to export", fix="--keep-best 1, or more")
    rated = [item for item in found if item.eval_loss is not None and not item.why]
    if not rated:
        raise UserError(
            "no complete checkpoint has a held-out loss",
            why="which ones are best is unknown; nothing was deleted",
            fix="--delete STEPS; in the next run train/sft.py --eval_strategy steps, with --eval_steps as --save_steps",
        )
    best = sorted(rated, key=lambda item: (item.eval_loss, -item.step))[:keep]
    newest = next(item for item in found if item.is_newest)
    return [item for item in found if item not in best and item.step < newest.step]


def _delete(command: CheckpointsCommand, found: list[Listed], chosen: list[Listed]) -> int:
    if not any(not item.why for item in found if item not in chosen) and any(not item.why for item in chosen):
        newest = next(item.folder for item in found if item.is_newest)
        raise UserError(
            f"no complete checkpoint of {store.uri_of(command.run) or command.run} would be left",
            why="nothing to resume from or to export; nothing was deleted",
            fix=f"leave out {Path(newest).name}"
            + (f"; or delete the folder itself: rm -r {newest}" if isinstance(newest, Path) else ""),
        )
    size = gb_or_mb(sum(item.size_bytes for item in chosen))
    if not command.dry_run:
        is_busy = any(item.why and isinstance(item.folder, Path) for item in chosen)
        with atomic_files.no_run(command.run) if is_busy else nullcontext():
            for item in chosen:
                _remove(item)
    if command.json:
        _put_json([item for item in found if item in chosen])
    for item in chosen if not command.json else ():
        console.put(f"{'would be deleted' if command.dry_run else 'deleted'}: {item.folder}")
    console.say(f"{counted(len(chosen), 'checkpoint')}, {size}", style="cyan")
    return 0


def _remove(item: Listed) -> None:
    if isinstance(item.folder, Path):
        completeness.delete(item.folder)
    else:
        uri, name = store.split(item.folder)
        place = Store(uri)
        with place.reached():
            place.delete(name)


def _put_table(found: list[Listed], as_json: bool) -> None:
    if as_json:
        _put_json(found)
        return
    now = datetime.now(timezone.utc)
    rows = [
        (
            str(item.step),
            item.why or "complete" + (", newest" if item.is_newest else "") + (", best" if item.is_best else ""),
            f"{item.engine}, {counted(item.ranks, 'rank')}" if item.engine else item.kind or "-",
            gb_or_mb(item.size_bytes),
            _age((now - item.written).total_seconds()) if item.written else "-",
            _loss(item.loss),
            _loss(item.eval_loss),
            str(item.folder),
        )
        for item in found
    ]
    titles = ("step", "state", "engine", "size", "age", "loss", "held-out loss", "folder")
    console.show_table(titles, rows, ["yellow" if item.why else "" for item in found], whole=True)


def _put_json(found: list[Listed]) -> None:
    rows = [
        {"complete": not item.why, **asdict(item), "written": item.written and item.written.isoformat()}
        for item in found
    ]
    console.put(json.dumps(rows, indent=2, default=str), lines=True)


def _loss(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.4g}"


def _age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.{0 if seconds >= 10 * size else 1}f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def _show_differences(command: CheckpointsCommand, words: str) -> int:
    if words.count(",") != 1:
        raise UsageError(
            f"--diff {words}",
            why="two checkpoints are compared",
            fix="--diff 10,20, or two folders with a comma between",
        )
    places = [_place(command.run, word) for word in words.split(",")]
    with closing(FileReader()) as reader:
        tensors = []
        for place in places:
            weights = open_checkpoint.read(place, reader)
            tensors.append({**weights.tensors, **weights.adapter})
        with console.progress("comparing", differences.total_bytes(*tensors)) as progress:
            found = list(differences.differences(tensors[0], tensors[1], reader, progress))
        reader.check()
    if command.json:
        console.put(json.dumps([asdict(item) for item in found], indent=2), lines=True)
        return 0
    equal = [item for item in found if item.is_equal]
    unlike = [item for item in found if item.why]
    changed = sorted((item for item in found if not item.is_equal and not item.why), key=lambda item: item.rank)
    for item in unlike:
        console.put(f"{item.name} {item.why}", style="yellow")
    if changed:
        shown = changed[:MOST_SHOWN]
        rows_shown = [_row(item) for item in shown]
        titles = ("tensor", "changed by", "at most", "of its elements")
        console.show_table(titles, rows_shown, [""] * len(shown), whole=True)
    rest = f"; the {MOST_SHOWN} that changed most are above" if len(changed) > MOST_SHOWN else ""
    kinds = (f"{len(changed)} changed{rest}", f"{len(equal)} equal", f"{len(unlike)} unlike in name, shape or dtype")
    console.say(f"{counted(len(found), 'tensor')}: {listed(kinds, 'and')}", style="cyan")
    return 0


def _place(run: Path, word: str) -> CheckpointLocation:
    """The checkpoint that a word names: a step of the run, or a folder or file."""
    if not word.isdecimal():
        return discover.find(Path(word))[0]
    return discover.find(Path(_of_steps(run, checkpoints(run), (word,))[0].folder))[0]


def _row(item: Difference) -> tuple[str, str, str, str]:
    relative = "from 0" if item.relative is None else f"{item.relative:.2%}"
    return item.name, relative, f"{item.largest:.3g}", f"{item.share:.1%}"
