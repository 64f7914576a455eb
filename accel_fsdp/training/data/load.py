"""Loads data sets from the hub and from files."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from accel_fsdp import disks
from accel_fsdp.errors import UserError, did_you_mean, first_line
from accel_fsdp.models import check_local_path

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict

FILE_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
FILE_ENDINGS = (*FILE_BUILDERS, ".txt", ".arrow", ".zip", ".gz", ".tar")
"""Endings that names on the hub don't have: they distinguish a path of two parts from such a name."""
SAVED = ("dataset_dict.json", "state.json")
"""Files that `save_to_disk` writes into a folder."""


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
        raise _unreadable(name, _cause(error) + hint) from error


def check_name(name: str) -> None:
    """Refuses a name that can only be a file or folder and doesn't exist; names on the hub pass."""
    path = Path(name)
    is_local = path.suffix in FILE_ENDINGS and not path.is_absolute()
    check_local_path(f"./{name}" if is_local else name, "data set", "trl-lib/Capybara")


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
    """Raises a UserError if rows that are read in the block, such as those of a stream, can't be parsed."""
    from datasets.exceptions import DatasetsError
    from pyarrow import ArrowInvalid  # type: ignore[import-untyped]

    try:
        yield
    except (DatasetsError, ArrowInvalid) as error:
        raise _unreadable(name, _cause(error)) from error


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


def _cause(error: Exception) -> str:
    return first_line(Exception(str(error.__cause__ or error) or "it has no rows"))
