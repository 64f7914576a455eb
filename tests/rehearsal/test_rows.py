"""Rows for a rehearsal: what train/sft.py can read goes in, and what comes out it reads as well."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import CHAT_DATA
from datasets import Dataset, DatasetDict
from transformers import AutoTokenizer

from accel_fsdp.errors import UserError
from accel_fsdp.rehearsal import cut
from accel_fsdp.training.data import DataArguments, load, tokenizing


def read(folder: Path, split: str = "train") -> list[dict[str, Any]]:
    return list(load.split(load.load(str(folder)), split))


def rows(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"Q{number}", "completion": "A" * (1 + number % 5)} for number in range(count)]


def test_the_first_rows_of_a_folder(tmp_path: Path) -> None:
    for split in ("train", "test"):
        cut_rows = cut(str(CHAT_DATA), tmp_path / split, split, count=12)
        assert cut_rows.origin == "cut"
        assert read(cut_rows.folder, split) == read(CHAT_DATA, split)[:12]


def test_few_rows_are_repeated(tmp_path: Path) -> None:
    (tmp_path / "few.jsonl").write_text("\n".join(map(json.dumps, rows(3))))
    cut_rows = cut(str(tmp_path / "few.jsonl"), tmp_path / "cut", count=8)
    assert read(cut_rows.folder) == (rows(3) * 3)[:8]


def test_splits_of_other_names(tmp_path: Path) -> None:
    DatasetDict(train_sft=Dataset.from_list(rows(4)), held_out=Dataset.from_list(rows(2))).save_to_disk(tmp_path / "a")
    cut_rows = cut(str(tmp_path / "a"), tmp_path / "cut", "held_out", count=2)
    assert read(cut_rows.folder, "held_out") == rows(2)


@pytest.mark.parametrize("dataset", [None, "trl-lib/Capybara"])
@pytest.mark.parametrize("chats", [True, False])
def test_made_up_rows_are_tokenized(dataset: str | None, chats: bool, tiny_model: Path, tmp_path: Path) -> None:
    cut_rows = cut(dataset, tmp_path / "cut", count=16, chats=chats)
    assert cut_rows.origin == "made up"
    assert read(cut_rows.folder) != read(cut(dataset, tmp_path / "other", "test", count=16, chats=chats).folder, "test")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    if not chats:
        tokenizer.chat_template = None
    options = DataArguments(str(cut_rows.folder), max_length=64)
    tokens, summary = tokenizing.tokenize(load.split(load.load(str(cut_rows.folder)), "train"), tokenizer, options, 2)
    lengths = {len(row["input_ids"]) for row in tokens}
    assert len(tokens) == 16
    assert summary.longest == 64
    assert len(lengths) > 3


def test_what_cannot_be_read_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(UserError, match=r"broken\.jsonl: JSON parse error"):
        cut(str(tmp_path / "broken.jsonl"), tmp_path / "cut", count=4)
    with pytest.raises(UserError, match="no split validation"):
        cut(str(CHAT_DATA), tmp_path / "cut", "validation", count=4)
    assert not (tmp_path / "cut").exists()
    with pytest.raises(UserError, match=r"\./nowhere\.jsonl does not exist"):
        cut("nowhere.jsonl", tmp_path / "cut", count=4)
