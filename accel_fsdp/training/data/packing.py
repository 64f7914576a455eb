"""Packs several documents into one row without cutting them, and computes the saved padding."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from accel_fsdp.training.data.encoding import IGNORED

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset


def best_fit(lengths: "np.ndarray[Any, Any]", limit: int) -> list[list[int]]:
    """Packs documents into as few rows of at most `limit` tokens as best-fit-decreasing finds.

    Longest first, each goes where it leaves the least space. The rows' free spaces are bits of one number, so that the
    smallest sufficient space is its lowest bit from the length on: n documents take n such lookups.
    """
    bins: list[list[int]] = []
    free: dict[int, list[int]] = {}
    spaces = 0
    for document in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[document])
        fitting = spaces >> length
        if fitting:
            space = length + (fitting & -fitting).bit_length() - 1
            chosen = free[space].pop()
            if not free[space]:
                spaces ^= 1 << space
            bins[chosen].append(document)
        else:
            space, chosen = limit, len(bins)
            bins.append([document])
        free.setdefault(space - length, []).append(chosen)
        spaces |= 1 << (space - length)
    return bins


def padding_share(lengths: "np.ndarray[Any, Any]", batch_size: int) -> float:
    """The share of padding in batches of rows of these lengths, taken in one shuffled order."""
    shuffled = np.random.default_rng(0).permutation(lengths)
    batches = [shuffled[start : start + batch_size] for start in range(0, len(shuffled), batch_size)]
    places = sum(int(batch.max()) * len(batch) for batch in batches)
    return 1 - int(lengths.sum()) / places


class Packed:
    """A packed view of another data set, without a copy of its tokens.

    `lengths` are those of the packed rows, `bins` the rows of the other data set in each.
    """

    def __init__(self, tokens: "Dataset", lengths: "np.ndarray[Any, Any]", max_length: int) -> None:
        self.tokens = tokens.with_format("numpy")
        self.bins = best_fit(lengths, max_length)
        self.lengths = np.asarray([lengths[rows].sum() for rows in self.bins])

    def __len__(self) -> int:
        return len(self.bins)

    def __getitem__(self, index: int) -> dict[str, "np.ndarray[Any, Any]"]:
        rows = self.tokens[self.bins[index]]
        return joined(rows["input_ids"], rows["labels"])


def pack_stream(rows: "IterableDataset", max_length: int, window: int) -> "IterableDataset":
    def pack(batch: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        ids, labels = ([np.asarray(tokens) for tokens in batch[name]] for name in ("input_ids", "labels"))
        bins = best_fit(np.asarray([len(tokens) for tokens in ids]), max_length)
        packed = [joined([ids[row] for row in rows], [labels[row] for row in rows]) for rows in bins]
        return {name: [row[name] for row in packed] for name in ("input_ids", "labels", "position_ids")}

    return rows.map(pack, batched=True, batch_size=window)


def joined(ids: Sequence[Any], labels: Sequence[Any]) -> dict[str, "np.ndarray[Any, Any]"]:
    """One row of several documents.

    The first token of each has no label, so that the previous document doesn't predict it.
    """
    targets = np.concatenate(list(labels))
    targets[np.cumsum([0, *(len(document) for document in ids[:-1])])] = IGNORED
    return {
        "input_ids": np.concatenate(list(ids)),
        "labels": targets,
        "position_ids": np.concatenate([np.arange(len(document)) for document in ids]),
    }
