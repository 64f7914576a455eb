"""Finds and fetches the checkpoint of a store that a run resumes (`--checkpoint_uri`)."""

import contextlib
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from accel_fsdp import checkpoints, console
from accel_fsdp.checkpoints import Store, completeness, file_names
from accel_fsdp.errors import UserError
from accel_fsdp.units import gb_or_mb

if TYPE_CHECKING:
    from transformers import TrainingArguments

T = TypeVar("T")


def gather_answers(answers: list[T]) -> list[T]:
    """The results of all ranks, in rank order."""
    from accelerate.utils import gather_object

    return list(gather_object(answers))


def check_unused(training: "TrainingArguments") -> None:
    """Raises a UserError, on all ranks, if the store of a new run holds a run. A store that is down holds up none."""
    if not training.checkpoint_uri:
        return
    store = Store(training.checkpoint_uri)

    def names() -> list[str]:
        try:
            with store.reached():
                return store.checkpoints()
        except UserError as error:
            console.say(f"{error.what}; training goes on, and checkpoints are uploaded once it answers", style="yellow")
            return []

    if _by_first(training, names):
        raise UserError(
            f"{store.uri} already holds a run",
            why="its checkpoints and this run's would be mixed up",
            fix="--resume_from_checkpoint true to go on with it, or another --checkpoint_uri",
        )


def fetch_newer(training: "TrainingArguments", flaw_of: Callable[[Path], str]) -> None:
    """Fetches the store's newest complete checkpoint if it is newer than those here: each rank a part of its files.

    One whose bytes have changed is marked as unfinished there, and the one before it is taken.

    Raises:
        UserError: nothing is here and the store can't be reached, or the disk is full. Nothing is left of it then.
    """
    if not training.checkpoint_uri:
        return
    store, output, damaged = Store(training.checkpoint_uri), Path(training.output_dir), set[str]()
    here = _by_first(training, lambda: completeness.choose(output).newest)

    def newest() -> tuple[str, dict[str, int]]:
        try:
            with store.reached():
                name = store.newest(damaged)[0]
                return name, store.sizes(name) if name else {}
        except UserError as error:
            if here is None:
                raise
            console.say(f"{error.what}; a newer checkpoint than {here} can't be looked for", style="yellow")
            return "", {}

    def drop(name: str, why: str) -> None:
        console.say(f"skipped: {store.uri}/{name}: {why}", style="yellow")
        shutil.rmtree(output / name)
        with store.reached():
            store.unseal(name)

    while True:
        name, sizes = _by_first(training, newest)
        if not name or (here is not None and file_names.step(here.name) >= file_names.step(name)):
            return
        _fetch(training, store, name, sizes)
        if not (why := flaw_of(output / name)):
            return
        _by_first(training, partial(drop, name, why))
        damaged.add(name)


def _fetch(training: "TrainingArguments", store: Store, name: str, sizes: Mapping[str, int]) -> None:
    """Fetches a checkpoint, each rank a part of its files."""
    output, size_bytes, is_first = Path(training.output_dir), sum(sizes.values()), training.process_index == 0
    own = sorted(sizes, key=lambda file: -sizes[file])[training.process_index :: training.world_size]
    if is_first:
        console.say(f"fetching {name} from {store.uri}: {gb_or_mb(size_bytes)}", style="cyan")

    def fetch() -> None:
        with store.reached():
            store.fetch(name, own, checkpoints.store.arriving_at(output, name))

    with contextlib.ExitStack() as folder:
        arriving = checkpoints.store.arriving(output, name, size_bytes)
        _together(lambda: folder.enter_context(arriving) if is_first else None)
        _together(fetch)
        _together(folder.close)  # it gets its name


def _by_first(training: "TrainingArguments", action: Callable[[], T]) -> T:
    """What `action` returns on the first rank."""
    return _together(action if training.process_index == 0 else lambda: None)[0]  # type: ignore[return-value]


def _together(action: Callable[[], T]) -> list[T]:
    """What `action` returns on each rank; if it fails on one, all raise its error."""
    result, failed = None, None
    try:
        result = action()
    except UserError as error:
        failed = error
    except OSError as error:
        failed = UserError(
            f"cannot fetch a checkpoint: {error.strerror or error}", why="there is nothing to resume", fix="free space"
        )
    answers = gather_answers([(result, failed)])
    if errors := [error for _, error in answers if error is not None]:
        raise errors[0]
    return [answer for answer, _ in answers]  # type: ignore[misc]
