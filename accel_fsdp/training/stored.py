"""Checkpoints in a store (`--checkpoint_uri`): they are uploaded while training goes on, and fetched by a resume."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from transformers import TrainingArguments

from accel_fsdp import console
from accel_fsdp.checkpoints import Damaged, Store, completeness, file_names, marker
from accel_fsdp.errors import UserError, first_line
from accel_fsdp.launch_environment import LaunchEnvironment
from accel_fsdp.units import any_time, gb_or_mb
from accel_fsdp.waiting import comes_true

PAUSE_SECONDS = 1.0
"""How often a thread looks for a new checkpoint, or tries an upload again."""


class Uploads:
    """Uploads the newest checkpoint, with a thread on the first rank of each machine.

    Each thread uploads the files that its machine's ranks wrote, and the first machine's the marker, once all are
    there. A store that is down delays this, and never training. The threads are daemons: a rank that fails ends without
    them, and the next run uploads what is missing.
    """

    def __init__(self, trainer: Any, keep: int | None) -> None:
        if trainer.args.save_on_each_node:
            raise UserError(
                "--checkpoint_uri with --save_on_each_node",
                why="only checkpoints in a folder of all ranks are uploaded",
                fix="leave out --checkpoint_uri",
            )
        self.trainer, self.args, self.keep, self.launch = trainer, trainer.args, keep, LaunchEnvironment.now()
        self.store, self.output = Store(self.args.checkpoint_uri), Path(self.args.output_dir)
        self._newest = self._stored = None  # type: Path | None
        self._is_new, self._is_over, self._trouble = False, True, "still being uploaded"

    def begin(self) -> None:
        """Begins, with the newest complete checkpoint here if the store lacks it."""
        newest = completeness.choose(self.output).newest
        self._is_new = newest is None
        if newest is not None:
            self.offer(newest)
        if self.args.local_process_index == 0 and self._is_over:
            self._is_over = False
            threading.Thread(target=self._work, daemon=True).start()

    def offer(self, checkpoint: Path) -> None:
        """Uploads a checkpoint, unless a newer one comes before its end."""
        if self.args.local_process_index == 0:
            self._newest = Path(checkpoint)  # a new object, also for a step that is saved again

    def finish(self) -> str:
        """Waits until the newest checkpoint is in the store, but not for ever; returns what is left of it and why."""
        if self._newest is not self._stored and self.launch.machine_rank == 0:
            console.say(f"waiting for uploads, {self.args.upload_timeout:g} s at most", style="cyan")
        is_done = comes_true(lambda: self._newest is self._stored, self.args.upload_timeout)
        self._is_over = True
        return "" if is_done or self._newest is None else f"{self._newest.name}: {self._trouble}"

    def _work(self) -> None:
        while not self._is_over:
            checkpoint, earlier = self._newest, self._trouble
            try:
                if checkpoint and checkpoint is not self._stored and checkpoint.exists():
                    self._upload(checkpoint)
            except Exception as error:  # each store has its own library, with its own classes
                self._trouble = first_line(error)
                if checkpoint and checkpoint.exists() and self._trouble != earlier:  # not deleted for a newer one
                    what = f"{checkpoint.name} can't be uploaded to {self.store.uri}: {self._trouble}"
                    console.say(f"{what}; training continues, and so do the tries", style="yellow")
            time.sleep(PAUSE_SECONDS)

    def _upload(self, checkpoint: Path) -> None:
        """Uploads this machine's files, on the first one also the model's description, and then the marker."""
        began, machine, first_rank = time.monotonic(), self.launch.machine_rank, self.args.process_index
        described, sizes = self.output / file_names.DESCRIBED, marker.sizes_of(checkpoint)
        if self.store.marker_of(checkpoint.name) != marker.content_of(checkpoint):
            if self._is_new and (other := self.store.newest()):
                raise OSError(f"it holds {other} of another run")
            self._is_new = False
            self.store.unseal(checkpoint.name)
            ranks = range(first_rank, first_rank + self.launch.local_world_size)
            files = [(checkpoint, name) for name in marker.of_ranks(sizes, ranks, self.args.world_size)]
            files += [(described, name) for name in marker.sizes_of(described)] if machine == 0 else []
            for folder, name in files:
                if self._newest is not checkpoint:
                    return
                self.store.put(folder, name)
            while not self.store.seal(checkpoint, machine, self.launch.machines):
                if self._newest is not checkpoint or self._is_over:
                    return
                self._trouble = "another machine has not uploaded its files"
                time.sleep(PAUSE_SECONDS)
            if machine == 0:
                took = f"{gb_or_mb(sum(sizes.values()))} in {any_time(time.monotonic() - began)}"
                console.say(f"{checkpoint.name} is at {self.store.uri}: {took}", style="cyan")
        if machine == 0:
            self.store.retire(self.keep, self.trainer.state.best_model_checkpoint)
        self._stored = checkpoint


def check_unused(training: TrainingArguments) -> None:
    """Raises a UserError, on all ranks, if the store of a new run holds a run. An unreachable store raises nothing."""
    with _on_first(training, "training continues, and checkpoints are uploaded once it answers") as store:
        if store and store.checkpoints():
            raise UserError(
                f"{store.uri} already holds a run",
                why="its checkpoints and this run's would be mixed up",
                fix="--resume_from_checkpoint true to go on with it, or another --checkpoint_uri",
            )


def fetch_newer(training: TrainingArguments) -> None:
    """Fetches the store's newest complete checkpoint if it is newer than those here.

    One whose bytes have changed is marked as unfinished there, and the one before it is taken.

    Raises:
        UserError: nothing is here and the store can't be reached, or the disk is full. Nothing is left of it then.
    """
    output = Path(training.output_dir)
    here = completeness.choose(output).newest
    with _on_first(training, f"a newer checkpoint than {here} can't be looked for" if here else "") as store:
        while store and file_names.step(name := store.newest()) > file_names.step(here.name if here else ""):
            try:
                return store.get(name, output)
            except Damaged as damaged:
                console.say(f"skipped: {damaged.what}", style="yellow")
                store.unseal(name)


@contextmanager
def _on_first(training: TrainingArguments, otherwise: str) -> Iterator[Store | None]:
    """Yields the run's store on the first rank; if the block fails there, all raise its error, so that no rank waits.

    `otherwise` says what happens if the store can't be reached; empty if that is an error.
    """
    if not training.checkpoint_uri:
        yield None
        return
    failed: list[UserError] = []
    try:
        if training.process_index == 0:
            with (store := Store(training.checkpoint_uri)).reached(otherwise):
                yield store
        else:
            yield None
    except UserError as error:
        failed = [error]
    for of_first in gather_object(failed):
        raise of_first
