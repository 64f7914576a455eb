"""Which rows each rank trains on: mistakes are told with counts, and what is unusual and right is not one."""

import random
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.data.distributed import DistributedSampler

from accel_fsdp.job import from_run
from accel_fsdp.ranks import read, script
from accel_fsdp.ranks.drawn_rows import ObservedRows
from accel_fsdp.rehearsal import absent, drawn_rows

ROWS: Any = list(torch.randint(0, 100, (32, 12), generator=torch.Generator().manual_seed(0)))
RANKS = 2
PATCHED = ((DataLoader, "__init__"), (_BaseDataLoaderIter, "_next_index"), (_BaseDataLoaderIter, "__next__"))
Epochs = Iterator[Iterable[Any]]


def distributed(rank: int, rows: Any = ROWS, **how: Any) -> Any:
    return DistributedSampler(rows, num_replicas=RANKS, rank=rank, **how)


def prepared(loader: Any, rank: int, **how: Any) -> Any:
    return prepare_data_loader(loader, num_processes=RANKS, process_index=rank, put_on_device=False, **how)


def sampled(sampler: Any, rank: int, batch: int = 2) -> Any:
    return prepared(DataLoader(ROWS, batch, sampler=sampler), rank)


def unprepared(sampler: Any) -> Any:
    return DataLoader(ROWS, 2, sampler=sampler)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Ordered(Sampler[int]):
    """An own sampler: the places in an order."""

    def __init__(self, order: Iterable[int]) -> None:
        self.order = list(order)

    def __iter__(self) -> Iterator[int]:
        return iter(self.order)

    def __len__(self) -> int:
        return len(self.order)


class Stream(IterableDataset[torch.Tensor]):
    def __init__(self, rows: Iterable[torch.Tensor]) -> None:
        self.rows = list(rows)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.rows)


class Augmented(list[torch.Tensor]):
    """Gives other values at each call."""

    def __getitem__(self, place: Any) -> Any:
        return super().__getitem__(place) + random.randrange(100)


def padded(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rows of several lengths, padded to the longest of the batch."""
    cut = [row[: 4 + int(row[0]) % 8] for row in rows]
    ids = torch.nn.utils.rnn.pad_sequence(cut, batch_first=True, padding_value=-1)
    return {"input_ids": ids, "attention_mask": ids != -1}


def shuffled(seed: int) -> list[int]:
    return torch.randperm(32, generator=seeded(seed)).tolist()  # type: ignore[no-any-return]


def each_epoch(rank: int, **how: Any) -> Epochs:
    sampler = distributed(rank, ROWS[:15], **how)
    loader: Any = DataLoader(ROWS[:15], batch_size=4, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        yield loader


def peeks(rank: int) -> Epochs:
    loader: Any = DataLoader(ROWS, batch_size=4, sampler=distributed(rank))
    next(iter(loader))
    yield loader


def again(loader: Any, batches: int = 99) -> Epochs:
    for _ in range(2):
        yield (batch for _, batch in zip(range(batches), loader, strict=False))


RIGHT: dict[str, Callable[[int], Epochs]] = {
    "DistributedSampler": each_epoch,
    "DistributedSampler that drops": lambda rank: each_epoch(rank, drop_last=True),
    "prepared": lambda rank: again(prepared(DataLoader(ROWS[:29], 4, shuffle=True, generator=seeded(1)), rank)),
    "prepared, fewer rows than a batch of all": lambda rank: again(prepared(DataLoader(ROWS[:5], 4), rank)),
    "prepared, split": lambda rank: again(prepared(DataLoader(ROWS[:29], 8), rank, split_batches=True)),
    "prepared, a part of an epoch": lambda rank: again(prepared(DataLoader(ROWS, 2), rank), 2),
    "prepared, skips": lambda rank: again(skip_first_batches(prepared(DataLoader(ROWS, 2), rank), 3)),
    "rows that come twice": lambda rank: again(prepared(DataLoader(ROWS[:16] * 2, 2), rank)),
    "one row everywhere": lambda rank: again(DataLoader(ROWS[:1] * 32, 2, shuffle=True)),
    "parts": lambda rank: again(DataLoader(ROWS[rank::2], 2, shuffle=True)),
    "uneven parts": lambda rank: again(DataLoader(ROWS[:20] if rank else ROWS[20:], 2, shuffle=True)),
    "with replacement": lambda rank: again(unprepared(WeightedRandomSampler([0.5] * 32, 32))),
    "some at random": lambda rank: again(unprepared(RandomSampler(ROWS, num_samples=16))),
    "curriculum": lambda rank: again(sampled(Ordered(shuffled(0)), rank)),
    "own batches": lambda rank: again(prepared(DataLoader(ROWS, batch_sampler=[[0, 1], [2, 3, 4], [5]]), rank,
                                               even_batches=False)),
    "augmented": lambda rank: again(DataLoader(Augmented(ROWS), 2, sampler=distributed(rank, shuffle=False))),
    "stream": lambda rank: again(prepared(DataLoader(Stream(ROWS[:21]), 4), rank)),
    "workers": lambda rank: again(prepared(DataLoader(ROWS[:29], 4, num_workers=2), rank)),
    "peeks": peeks,
    "more rows than are recorded": lambda rank: again(sampled(Ordered(range(32)), rank, 1)),
}  # fmt: skip


class Texts(Dataset[Any]):
    """An own data set of the rows that a rank was given."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, place: int) -> Any:
        return torch.tensor([ord(letter) for letter in self.texts[place]])


TEXTS = [f"row {place:02}" for place in range(32)]


def own_part(rank: int) -> Epochs:
    part = TEXTS[rank::RANKS]
    return again(prepared(DataLoader(Texts(part), 2), rank))


WRONG: dict[str, tuple[Callable[[int], Epochs], str]] = {
    "an own part of the rows, split again": (own_part, "of its 16 rows a rank takes only 8 in an epoch: the script"),
    "sharded twice": (
        lambda rank: again(sampled(distributed(rank), rank), 2),
        "of 32 rows the ranks take only 16 in an epoch: accelerator.prepare and a DistributedSampler both",
    ),
    "another seed, padded": (
        lambda rank: again(DataLoader(ROWS, 2, sampler=distributed(rank, seed=rank), collate_fn=padded)), "of 14 rows",
    ),
    "not prepared": (lambda rank: again(DataLoader(ROWS, 2, shuffle=True)), r"on \d\d of 30 rows"),
    "one rank number": (lambda rank: again(unprepared(distributed(0))), "on 14 of 14 rows"),
    "overlapping parts": (lambda rank: again(DataLoader(ROWS[12 * rank :][:20], 2, shuffle=True)), r"on \d of 18 rows"),
    "no set_epoch": (
        lambda rank: again(unprepared(distributed(rank))),
        "epoch 2 has the rows of epoch 1 in the same order, 14 on rank 0",
    ),
}  # fmt: skip


def installed(patched: pytest.MonkeyPatch) -> ObservedRows:
    patched.setattr("sys.argv", [__file__])
    patched.setattr("accel_fsdp.ranks.script._started", None)
    for owner, name in PATCHED:
        patched.setattr(owner, name, getattr(owner, name))
    observed = ObservedRows()
    observed.install()
    return observed


def judged(folder: Path, monkeypatch: pytest.MonkeyPatch, epochs: Callable[[int], Epochs]) -> str:
    """What is said of two ranks, which run one after the other here."""
    monkeypatch.setenv("ACCEL_FSDP_EVENTS", str(folder))
    monkeypatch.setenv("WORLD_SIZE", str(RANKS))
    monkeypatch.setattr(from_run, "ranks_may_share_rows", lambda: False)  # torch keeps meshes of other tests
    for rank in range(RANKS):
        with monkeypatch.context() as patched:
            patched.setenv("RANK", str(rank))
            observed = installed(patched)
            torch.manual_seed(rank)
            for epoch in epochs(rank):
                for _ in epoch:
                    observed.ran_backward()
            observed.report_end()
    return "; ".join(failure.what for failure in drawn_rows.find(read(folder)))


@pytest.mark.parametrize("way", RIGHT)
def test_right_ways_to_share_rows(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if way.startswith("more rows"):
        monkeypatch.setattr("accel_fsdp.ranks.drawn_rows.MOST_ROWS", 6)
    assert not judged(tmp_path, monkeypatch, RIGHT[way])


@pytest.mark.parametrize("way", WRONG)
def test_wrong_ways_to_share_rows(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    epochs, message = WRONG[way]
    assert re.search(message, judged(tmp_path, monkeypatch, epochs))


def test_the_line_of_a_random_split_is_named(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("order = shuffle(rows)\ntrain, rest = random_split(order, [40, 8])\nloader = DataLoader(train)\n")
    assert script.nearest_line(f"{file}:3", *drawn_rows.DRAWING) == f"{file}:2"
    other = tmp_path / "other.py"
    other.write_text("loader = DataLoader(rows, shuffle=True)\n")
    assert script.nearest_line(f"{other}:1", *drawn_rows.DRAWING) == f"{other}:1"


def test_names_of_a_rank_are_those_that_come_from_one() -> None:
    source = """
rank = 8
lora_rank = args.lora_rank
me = int(os.environ["RANK"])
is_first = me == 0
if lora_rank > 4: pass
if rank > 4: pass
if is_first: pass
if accelerator.is_main_process: pass
"""
    tree = absent.ast.parse(source)
    names = absent.names_of_rank(tree)
    tests = [node.test for node in tree.body if isinstance(node, absent.ast.If)]
    assert [absent.names_a_rank(test, names) for test in tests] == [False, False, True, True]


def test_an_evaluation_at_the_end_has_no_epoch_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    observed = installed(monkeypatch)
    loader = DataLoader(ROWS[:5], 2)
    assert len(loader) == 3
    for _ in prepared(loader, 0):
        observed.ran_backward()
    for _ in DataLoader(ROWS, 2):
        pass
    assert observed.batches == (3, 2)


def test_evaluations_on_several_sets_are_observed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An observer that fails is reported as `unwatched`."""
    monkeypatch.setattr(ObservedRows, "ran_backward", lambda _: None)
    first, second = DataLoader(ROWS, 2), DataLoader(ROWS, 2)
    judged(tmp_path, monkeypatch, lambda _: iter([first, second, second]))
    assert not read(tmp_path)


def test_a_rank_that_is_read_from_a_variable_splits_no_rows(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text('import os\nrank = int(os.environ["LOCAL_RANK"])\nrows = rows[rank::2]\n')
    assert drawn_rows.line_of_split(str(script)) == 3
