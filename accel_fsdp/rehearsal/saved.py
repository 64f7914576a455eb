"""Checks the folders that a script saved: names those that are empty, partial or unloadable, with the script's line."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from math import prod
from pathlib import Path

from accel_fsdp.checkpoints import FileReader, discover, file_names, open_checkpoint
from accel_fsdp.errors import UserError
from accel_fsdp.launch.ranks import RankEvent


@dataclass(frozen=True)
class BadSave:
    """A folder without a whole model, and the line of the script that saved it by a `call`."""

    call: str
    what: str
    line: str
    is_adapter: bool


def bad(events: Sequence[RankEvent], weights: int) -> Iterator[BadSave]:
    """Yields the folders with fewer than `weights` weights, and empty adapters."""
    saves = {event.content["folder"]: event.content for event in events if event.kind == "saved"}
    for folder, content in saves.items():
        if flaw := _flaw(Path(folder), weights):
            is_adapter = Path(folder, file_names.ADAPTER_CONFIG).is_file()
            yield BadSave(content["call"], f"{content['call']} left {folder} {flaw}", content["line"], is_adapter)


def _flaw(folder: Path, weights: int) -> str:
    if not folder.is_dir():
        return "" if not folder.exists() else "as a file"
    try:
        checkpoint = discover.look(folder)
        if checkpoint is None:
            return "without weights"
        weights_there, is_adapter = _elements(checkpoint)
    except UserError as error:
        return f"unreadable: {error.what}"
    if weights_there == 0:
        return "with 0 tensors"
    if not is_adapter and weights_there < weights:
        return f"with {weights_there:,} of {weights:,} weights"
    return ""


def _elements(checkpoint: discover.CheckpointLocation) -> tuple[int, bool]:
    """The number of weights, and whether they are an adapter's, which is saved without its base."""
    if checkpoint.kind in discover.EXPORTED:
        count = sum(prod(tensor.shape) for tensor in open_checkpoint.of_place(checkpoint.weights).values())
        return count, checkpoint.kind == "adapter"
    with closing(FileReader()) as reader:
        content = open_checkpoint.read(checkpoint, reader)
    count = sum(prod(tensor.shape) for part in (content.tensors, content.adapter) for tensor in part.values())
    return count, bool(content.adapter)
