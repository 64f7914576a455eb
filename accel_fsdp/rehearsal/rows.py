"""A few rows for a rehearsal: cut from the user's files, in any format that training reads, or made up."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Literal, TypeAlias

from accel_fsdp import atomic_files
from accel_fsdp.errors import UserError, first_line
from accel_fsdp.rehearsal.job import CallFailed, Rehearsed
from accel_fsdp.training.data import load

WORDS = (
    *("shard", "layer", "gradient", "gather", "scatter", "rank", "weight", "optimizer", "step", "loss"),
    *("batch", "token", "the", "a", "of", "and", "before", "after", "each", "every", "why", "how", "where"),
    *("memory", "node", "link"),
)
HUB_SECONDS = 20
"""Seconds that the hub may take; libraries retry for minutes."""
COUNT = 64
"""Rows of a split."""
Origin: TypeAlias = Literal["cut", "made up"]
LENGTHS = (3, 40, 9, 120, 20, 6, 70, 14)
"""Words of a made-up text, row by row: some rows are shorter than a batch's others, some longer than the cut length."""


@dataclass(frozen=True)
class Rows:
    """A folder with a file of rows, which `train/sft.py --dataset_name` takes.

    `origin` is "cut" for rows of the user's own data set, "made up" for others.
    """

    folder: Path
    origin: Origin

    @property
    def columns(self) -> frozenset[str]:
        (file,) = self.folder.glob("data/*.jsonl")
        with file.open(encoding="utf-8") as lines:
            return frozenset(json.loads(next(lines, "{}")))


def cut(
    dataset: str | None,
    target: Path,
    split: str = "train",
    config_name: str | None = None,
    *,
    count: int = COUNT,
    chats: bool = True,
    from_hub: bool = False,
) -> Rows:
    """Writes `count` rows of a split to the folder `target`, which it replaces; the same ones every time.

    They are the first rows of `dataset` if it is a file or folder on this machine, or with `from_hub` a name on the
    hub; repeated if it has fewer. Otherwise they are made up: conversations, or without `chats` plain texts, for a
    tokenizer without a chat template.
    """
    if dataset is not None:
        load.check_name(dataset)
    origin: Origin = "made up"
    rows = _made_up(count, split, chats)
    if dataset is not None and (from_hub or Path(dataset).exists()):
        with load.reading(dataset):
            first = list(islice(load.split(load.load(dataset, config_name, streaming=True), split), count))
        origin, rows = "cut", islice(cycle(first), count)
    with atomic_files.replaced_folder(target) as folder:
        (folder / "data").mkdir()
        # values without a JSON type, such as dates, become text
        lines = [json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows]
        (folder / "data" / f"{split}-00000-of-00001.jsonl").write_text("".join(lines), encoding="utf-8")
    return Rows(target, origin)


def of_hub(launcher: Rehearsed, dataset: str, split: str, config_name: str | None, target: Path) -> str:
    """Writes rows of a data set on the hub to the folder `target`; returns why that failed, empty on success.

    It does that in a process that is ended if the network blocks. The user's variables for the hub apply: endpoint,
    token, proxies, caches, and HF_HUB_OFFLINE.

    Raises:
        UserError: the data set exists, but without this configuration or split, or it can't be read.
    """
    try:
        return replace(launcher, seconds=HUB_SECONDS).call("hub", _write, dataset, target, split, config_name)
    except CallFailed as error:
        if error.outcome.hang:
            return f"the hub gave none in {HUB_SECONDS} seconds"
        return f"the process that reads it ended with exit code {error.outcome.code}"


def _write(dataset: str, target: Path, split: str, config_name: str | None) -> str:
    from datasets.exceptions import DatasetNotFoundError

    try:
        cut(dataset, target, split, config_name, from_hub=True)
    except Exception as error:  # any error of the network: rows can be made up
        cause = error.__cause__ or error
        is_lost = type(cause) is FileNotFoundError  # its subclasses name a missing part of the data set
        if isinstance(error, UserError) and not (is_lost or isinstance(cause, DatasetNotFoundError | ConnectionError)):
            raise
        return first_line(cause)
    return ""


def _made_up(count: int, split: str, chats: bool) -> Iterator[dict[str, Any]]:
    chance = random.Random(split)
    for number in range(count):
        text = f"{' '.join(chance.choices(WORDS, k=LENGTHS[number % len(LENGTHS)]))}."
        question = f"{' '.join(chance.choices(WORDS, k=5))}?"
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": text}]
        yield {"messages": turns} if chats else {"text": text}
