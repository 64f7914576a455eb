"""Observes data sets without indices that Accelerate splits or dispatches: whether all ranks have the same one."""

import contextlib
import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from accel_fsdp.launch.ranks import events

MOST_CHARACTERS = 60
"""The length up to which an attribute's value is compared."""
ADDRESS = re.compile(r"0x[0-9a-f]+")
"""A part of Python's names of objects, other in each process."""


class ObservedStreams:
    """Keeps the prepared streams; the first row of each is read again when the script has ended."""

    def __init__(self) -> None:
        self.streams: list[tuple[Any, bool]] = []

    def prepared(self, items: Iterable[Any]) -> None:
        """Called with what `accelerator.prepare` returned."""
        from accelerate.data_loader import DataLoaderDispatcher, IterableDatasetShard
        from torch.utils.data import DataLoader, IterableDataset

        for loader in (item for item in items if isinstance(item, DataLoader)):
            data: Any = loader.dataset
            if isinstance(data, IterableDatasetShard):
                self.streams.append((data.dataset, False))
            elif isinstance(data, IterableDataset):
                self.streams.append((data, isinstance(loader, DataLoaderDispatcher)))

    def report_end(self, lines: Mapping[int, str]) -> None:
        """`lines` are those that made the loaders, by the number of their data set."""
        for number, (stream, is_dispatched) in enumerate(self.streams):
            attributes, line = _attributes(stream), lines.get(id(stream), "")
            events.report(
                "stream", number=number, dispatched=is_dispatched, attributes=attributes, row=_first(stream), line=line
            )


def _attributes(stream: Any) -> dict[str, str]:
    """The short attributes of a data set, also the rank that `split_dataset_by_node` gave one of datasets."""
    values = dict(vars(stream))
    if split := values.get("_distributed"):
        values["rank"] = split.rank
    simple = {name: str(value) for name, value in values.items() if isinstance(value, int | float | str | tuple | list)}
    return {name: text for name, text in simple.items() if len(text) <= MOST_CHARACTERS}


def _first(stream: Any) -> str:
    """A checksum of the first row; empty if there is none."""
    with contextlib.suppress(Exception):  # a data set's own code may raise any error
        row = ADDRESS.sub("", repr(next(iter(stream))))
        return hashlib.blake2b(row.encode(), digest_size=8).hexdigest()
    return ""
