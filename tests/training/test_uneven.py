"""Rows that don't divide by the rows of a step: each is trained once in an epoch, on any number of ranks."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from conftest import SFT, accelerate_launch, made_yaml
from datasets import Dataset
from reference import job_words
from safetensors.torch import load_file
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from accel_fsdp.training.data import IGNORED, Collator, batching

ROWS, STEPS, ROWS_PER_STEP = 37, 12, 12
EPSILON = ("--adam_epsilon", "0.01")
"""Else Adam makes a whole step of the rounding of a gradient near zero."""


def sft(folder: Path, model: Path, data: Path, ranks: int, batch: tuple[int, int], *more: str) -> None:
    """A run in `folder` with so many rows per rank and micro-batches."""
    config = folder.with_suffix(".yaml")
    config.write_text(made_yaml(model=str(model), num_processes=str(ranks), mixed_precision="no"))
    words = job_words(model, data, folder, STEPS, batch[0], save_steps=3)
    words += ["--gradient_accumulation_steps", str(batch[1]), "--train_sampling_strategy", "random", *EPSILON]
    finished = accelerate_launch(config, SFT, *words, *more)
    assert finished.code == 0, finished.output


def losses(run: Path, step: int) -> list[float]:
    state = json.loads((run / f"checkpoint-{step}" / "trainer_state.json").read_text())
    return [row["loss"] for row in state["log_history"] if "loss" in row]


@pytest.mark.slow
def test_a_resumed_run_is_the_unbroken_one_on_any_number_of_ranks(
    tiny_model: Path, text_data: Path, tmp_path: Path
) -> None:
    """Three epochs of four steps on 2 ranks; and on 2, then 3, then 1, with a last step of one row in each epoch."""
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(text_data.read_text().splitlines(True)[:ROWS]))
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    sft(whole, tiny_model, data, 2, (3, 2))
    shutil.copytree(whole / "checkpoint-3", parts / "checkpoint-3")
    resume = ("--resume_from_checkpoint", "true")
    sft(parts, tiny_model, data, 3, (2, 2), *resume, "--max_steps", "6")
    shutil.rmtree(parts / "final")
    sft(parts, tiny_model, data, 1, (4, 3), *resume)
    assert losses(parts, STEPS) == pytest.approx(losses(whole, STEPS), abs=1e-6)
    weights, again = (load_file(run / "final" / "model.safetensors") for run in (whole, parts))
    for name, tensor in weights.items():
        torch.testing.assert_close(again[name], tensor, atol=1e-6, rtol=0)


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
