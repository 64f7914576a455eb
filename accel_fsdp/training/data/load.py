"""Loads data sets from the hub and from files, and names the broken file and row."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from accel_fsdp import disks, untrusted_files
from accel_fsdp.checkpoints import file_names
from accel_fsdp.config import yaml_checks
from accel_fsdp.errors import UserError, did_you_mean
from accel_fsdp.models import check_local_path, first_line

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict

FILE_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
FILE_ENDINGS = (*FILE_BUILDERS, ".txt", ".arrow", ".zip", ".gz", ".tar")
"""Endings that names on the hub don't have: they distinguish a path of two parts from such a name."""
SAVED = ("dataset_dict.json", "state.json")
"""Files that `save_to_disk` writes into a folder."""
CARDS = (file_names.CARD, ".huggingface.yaml")


def load(name: str, config_name: str | None = None, *, streaming: bool = False) -> "DatasetDict | IterableDatasetDict":
    """Loads all splits of a hub data set, a local folder (files named after their split) or one local file.

    With `streaming` rows are read when they are used.
    """
    path = Path(name)
    check_name(name)
    try:
        with filling_cache(name):
            return _load(name, path, config_name, streaming)
    except _load_errors() as error:
        hint = "" if path.exists() else " (and there is no file or folder of that name here)"
        raise _unreadable(name, (_broken_file(path) or _cause(error)) + hint) from error


def check_name(name: str) -> None:
    """Refuses a name that can only be a file or folder and doesn't exist; names on the hub pass."""
    path = Path(name)
    is_local = path.suffix in FILE_ENDINGS and not path.is_absolute()
    check_local_path(f"./{name}" if is_local else name, "data set", "trl-lib/Capybara")
    for card in CARDS:
        _check_card(path / card, path)


def _check_card(card: Path, folder: Path) -> None:
    """Refuses aliases of absurd size in the YAML of a folder's card, which datasets reads."""
    text = untrusted_files.read_text(card, within=folder) if card.is_file() else None
    if text and re.search(r"[\s,\[{]&\w", front := text.partition("\n---")[0]):
        yaml_checks.check_text(front, card)


def _load(name: str, path: Path, config_name: str | None, streaming: bool) -> "DatasetDict | IterableDatasetDict":
    from datasets import Dataset, DatasetDict, load_dataset, load_from_disk

    if any((path / file).is_file() for file in SAVED):
        saved = load_from_disk(name)
        return DatasetDict(train=saved) if isinstance(saved, Dataset) else saved
    if path.is_file():
        return load_dataset(_builder(path), data_files=name, streaming=streaming)
    return load_dataset(name, config_name, streaming=streaming)


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Names the broken file if reading rows in the block fails.

    Raises:
        UserError: a file of the data set can't be parsed. Errors of other kinds stay as they are.
    """
    try:
        yield
    except _load_errors() as error:
        broken = _broken_file(Path(name)) if Path(name).exists() else None
        if broken is None:
            raise
        raise _unreadable(name, broken) from error


@contextmanager
def filling_cache(name: str) -> Iterator[None]:
    """Reports a full disk as such: rows are written to a cache before they are used."""
    from datasets import config
    from datasets.exceptions import DatasetsError

    try:
        yield
    except (OSError, DatasetsError) as error:
        cache = Path(config.HF_DATASETS_CACHE)
        if not (full := disks.full(error, cache)):
            raise
        raise UserError(
            f"cannot load data set {name}: {full} at {cache}, the cache of data sets",
            why="its rows are written there before they are used",
            fix="free some space, or name a folder on another disk: HF_DATASETS_CACHE=FOLDER",
        ) from error


def _unreadable(name: str, what: str) -> UserError:
    return UserError(
        f"cannot load data set {name}: {what}",
        why="there is nothing to train on",
        fix="give a hub id, a folder with train.jsonl, or a valid .jsonl, .json, .csv or .parquet file",
    )


def _load_errors() -> tuple[type[Exception], ...]:
    """The errors that datasets raises for unreadable files."""
    from datasets.exceptions import DatasetsError

    return (DatasetsError, FileNotFoundError, ValueError, ConnectionError, StopIteration)


def _builder(path: Path) -> str:
    if path.suffix not in FILE_BUILDERS:
        raise UserError(
            f"data file {path} has an unknown ending",
            why="its format is unknown",
            fix="rename it to one of: " + ", ".join(FILE_BUILDERS),
        )
    return FILE_BUILDERS[path.suffix]


def split(data: "DatasetDict | IterableDatasetDict", name: str) -> "Dataset | IterableDataset":
    """Returns one split that has rows; for a stream that is only known when it is read."""
    from datasets import Dataset

    if name not in data:
        raise UserError(
            f"the data set has no split {name}.{did_you_mean(name, data)}",
            why="this run reads its rows from that split",
            fix="--dataset_train_split or --dataset_test_split with one of: " + ", ".join(data),
        )
    rows = data[name]
    if isinstance(rows, Dataset) and len(rows) == 0:
        raise UserError(
            f"split {name} of the data set is empty",
            why="there is nothing to train on",
            fix="give a data set with rows",
        )
    return rows


def whole(rows: "Dataset | IterableDataset") -> "Dataset":
    """All rows of a split, read now if it is a stream: every rank must evaluate on the same number of them."""
    from datasets import Dataset, IterableDataset

    return Dataset.from_list(list(rows)) if isinstance(rows, IterableDataset) else rows


def place(name: str, config_name: str | None, split: str, row: int) -> str:
    """The location of row `row` (from 0) of a split for the user: file and row in it, from 1; else the split's row."""
    for file, rows in _files(name, config_name, split):
        if row < rows:
            return f"{file}, row {row + 1}"
        row -= rows
    return f"{name}, split {split}, row {row + 1}" if split else f"{name}, row {row + 1}"


def _files(name: str, config_name: str | None, split: str) -> list[tuple[str, int]]:
    """The files of a local split with their numbers of rows, in the order in which datasets reads them."""
    from datasets import load_dataset, load_dataset_builder

    path = Path(name)
    if path.is_file():
        return [(name, len(load_dataset(_builder(path), data_files=name, split=split)))]
    if not path.is_dir() or any((path / file).is_file() for file in SAVED):
        return []
    data_files = load_dataset_builder(name, config_name).config.data_files or {}
    files = [Path(file) for file in data_files.get(split, []) if Path(file).suffix in FILE_BUILDERS]
    return [(str(file), len(load_dataset(_builder(file), data_files=str(file), split="train"))) for file in files]


def _broken_file(path: Path) -> str | None:
    """The first file that can't be read on its own, with its line if known."""
    from datasets import load_dataset

    paths = sorted(path.rglob("*")) if path.is_dir() else [path]
    for file in (file for file in paths if file.suffix in FILE_BUILDERS and file.is_file()):
        try:
            load_dataset(_builder(file), data_files=str(file))
        except _load_errors() as error:
            line = _broken_line(file) if file.suffix == ".jsonl" else None
            return f"{file}, {line or _cause(error)}"
    return None


def _broken_line(file: Path) -> str | None:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                json.loads(line.strip() or b"{}")
            except json.JSONDecodeError as error:
                return f"line {number}, column {error.colno}: {error.msg.removesuffix(' at')}"
            except UnicodeDecodeError:
                return f"line {number}: not UTF-8"
    return None


def _cause(error: Exception) -> str:
    return first_line(Exception(str(error.__cause__ or error) or "it has no rows"))
