"""Fetches the checkpoint of a store that a run resumes (`--checkpoint_uri`)."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from accelerate.utils import gather_object

from accel_fsdp import console
from accel_fsdp.checkpoints import Damaged, Store, completeness, file_names
from accel_fsdp.errors import UserError

if TYPE_CHECKING:
    from transformers import TrainingArguments


def check_unused(training: "TrainingArguments") -> None:
    """Raises a UserError, on all ranks, if the store of a new run holds a run. A store that is down holds up none."""

    def check(store: Store) -> None:
        try:
            with store.reached():
                names = store.checkpoints()
        except UserError as error:
            console.say(f"{error.what}; training goes on, and checkpoints are uploaded once it answers", style="yellow")
            return
        if names:
            raise UserError(
                f"{store.uri} already holds a run",
                why="its checkpoints and this run's would be mixed up",
                fix="--resume_from_checkpoint true to go on with it, or another --checkpoint_uri",
            )

    _on_first(training, check)


def fetch_newer(training: "TrainingArguments") -> None:
    """Fetches the store's newest complete checkpoint if it is newer than those here.

    One whose bytes have changed is marked as unfinished there, and the one before it is taken.

    Raises:
        UserError: nothing is here and the store can't be reached, or the disk is full. Nothing is left of it then.
    """

    def fetch(store: Store) -> None:
        here = completeness.choose(Path(training.output_dir)).newest
        try:
            with store.reached():
                name = store.newest()[0]
        except UserError as error:
            if here is None:
                raise
            console.say(f"{error.what}; a newer checkpoint than {here} can't be looked for", style="yellow")
            return
        if file_names.step(name) <= (file_names.step(here.name) if here else -1):
            return
        console.say(f"fetching {name} from {store.uri}", style="cyan")
        with store.reached():
            try:
                store.get(name, Path(training.output_dir))
            except Damaged as damaged:
                console.say(f"skipped: {damaged.what}", style="yellow")
                store.unseal(name)
                fetch(store)

    _on_first(training, fetch)


def _on_first(training: "TrainingArguments", action: Callable[[Store], None]) -> None:
    """Calls `action` on the first rank; if it fails, all raise its error, so that no rank waits for it."""
    if not training.checkpoint_uri:
        return
    failed: list[UserError] = []
    if training.process_index == 0:
        try:
            action(Store(training.checkpoint_uri))
        except UserError as error:
            failed = [error]
        except OSError as error:
            what = f"cannot fetch a checkpoint: {error.strerror or error}"
            failed = [UserError(what, why="there is nothing to resume", fix="free space")]
    for of_first in gather_object(failed):
        raise of_first
