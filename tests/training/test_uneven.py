"""Rows that don't divide by the rows of a step: each is trained once in an epoch, on any number of ranks.

`test_survive.py` has the same of real ranks.
"""

from types import SimpleNamespace

import pytest
from accelerate.data_loader import BatchSamplerShard
from datasets import Dataset
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from accel_fsdp.training.data import IGNORED, Collator, batching


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("flat", [False, True])
def test_every_row_once_and_as_many_batches_for_each_rank(flat: bool, ranks: int) -> None:
    rows = Dataset.from_dict({name: [[row, row, row] for row in range(10)] for name in ("input_ids", "labels")})
    packed = rows.map(lambda _: {"position_ids": [0, 1, 2]}) if flat else rows
    collate, seen, counts = Collator(0, packed=flat, flat=flat), [], set()
    for rank in range(ranks):
        batches = BatchSampler(range(10), batch_size=2, drop_last=False)
        shard = BatchSamplerShard(batches, num_processes=ranks, process_index=rank) if ranks > 1 else batches
        loader = DataLoader(batching.RowsAndNone(packed), batch_sampler=shard, collate_fn=collate)
        labels = [batch["labels"] for batch in batching.even_out(loader)]
        counts.add(len(labels))
        seen += [row for batch in labels for row in batch.reshape(-1, 3)[:, 0].tolist() if row != IGNORED]
    assert sorted(seen) == list(range(10))
    assert counts == {-(-10 // (2 * ranks))}


def test_a_loader_of_held_out_rows_drops_none() -> None:
    rows = batching.RowsAndNone(Dataset.from_dict({"input_ids": [[1]] * 5, "labels": [[1]] * 5}))
    loader = DataLoader(rows, batch_sampler=BatchSampler(range(5), 2, drop_last=True), collate_fn=list)
    assert [len(batch) for batch in batching.even_out(loader, keep_last=True)] == [2, 2, 1]


def test_batches_that_are_split_among_ranks_are_filled_once() -> None:
    """Accelerate's `split_batches`: each batch is already all ranks'."""
    for rank in range(3):
        batches = BatchSampler(SequentialSampler(range(14)), 12, drop_last=False)
        shard = BatchSamplerShard(batches, 3, rank, split_batches=True)
        batching.even_out(SimpleNamespace(batch_sampler=shard))
        own = [row for row in (12, 13) if row - 12 in range(4 * rank, 4 * rank + 4)]
        assert list(shard) == [list(range(4 * rank, 4 * rank + 4)), own + [-1] * (4 - len(own))]
