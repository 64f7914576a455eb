"""What a script's saves left: a folder that is empty, partial or unloadable is named, with the line that wrote it."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from math import prod
from pathlib import Path

from accel_fsdp.checkpoints import FileReader, discover, file_names, open_checkpoint
from accel_fsdp.errors import UserError
from accel_fsdp.launch.ranks import Event


@dataclass(frozen=True)
class BadSave:
    """A folder that holds no whole model, and the line of the script that saved it by a `call`."""

    call: str
    what: str
    line: str
    is_adapter: bool


def bad(events: Sequence[Event], weights: int) -> Iterator[BadSave]:
    """The folders that hold less than a model of so many weights; adapters that hold nothing."""
    said = {event.content["folder"]: event.content for event in events if event.kind == "saved"}
    for folder, content in said.items():
        if flaw := _flaw(Path(folder), weights):
            is_adapter = Path(folder, file_names.ADAPTER_CONFIG).is_file()
            yield BadSave(content["call"], f"{content['call']} left {folder} {flaw}", content["line"], is_adapter)


def _flaw(folder: Path, weights: int) -> str:
    if not folder.is_dir():
        return "" if not folder.exists() else "as a file"
    try:
        found = discover.look(folder)
        if found is None:
            return "without weights"
        held, is_adapter = _elements(found)
    except UserError as error:
        return f"unreadable: {error.what}"
    if held == 0:
        return "with 0 tensors"
    if not is_adapter and held < weights:
        return f"with {held:,} of {weights:,} weights"
    return ""


def _elements(found: discover.CheckpointLocation) -> tuple[int, bool]:
    """How many weights it has, and whether they are those of an adapter, which goes without its base."""
    if found.kind in discover.EXPORTED:
        held = sum(prod(one.shape) for one in open_checkpoint.of_place(found.weights).values())
        return held, found.kind == "adapter"
    with closing(FileReader()) as reader:
        content = open_checkpoint.read(found, reader)
    held = sum(prod(one.shape) for part in (content.tensors, content.adapter) for one in part.values())
    return held, bool(content.adapter)
