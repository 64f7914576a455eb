"""Data sets to tokens, compared with the tokenizer used directly."""

import json
from pathlib import Path

import pytest
from conftest import CHAT_DATA
from datasets import Dataset, DatasetDict
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from accel_fsdp import data
from accel_fsdp.errors import UserError


@pytest.fixture
def tokenizer(tiny_model: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model)


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_chats_go_through_the_template(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "Is it sharded?"}, {"role": "assistant", "content": "Yes."}]
    path = write(tmp_path / "chat.jsonl", {"messages": turns})
    tokens, summary = data.tokenize(data.split(data.load(str(path)), "train"), tokenizer, max_length=256)
    text = "<|im_start|>user\nIs it sharded?<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n"
    assert tokens[0]["input_ids"] == tokenizer(text)["input_ids"]
    assert tokens[0]["labels"] == tokens[0]["input_ids"]
    assert str(summary) == f"1 rows, {len(tokens[0]['input_ids'])} tokens"


def test_text_ends_with_the_end_token_and_long_rows_are_counted(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    path = write(tmp_path / "text.jsonl", {"body": "short"}, {"body": "long " * 50})
    tokens, summary = data.tokenize(
        data.split(data.load(str(path)), "train"), tokenizer, max_length=20, text_field="body"
    )
    assert tokens[0]["input_ids"] == [*tokenizer("short")["input_ids"], tokenizer.eos_token_id]
    assert len(tokens[1]["input_ids"]) == 20
    assert summary.truncated_rows == 1
    assert summary.tokens == len(tokens[0]["input_ids"]) + 20


def test_a_folder_has_its_splits_by_file_name() -> None:
    splits = data.load(str(CHAT_DATA))
    assert set(splits) == {"train", "test"}
    with pytest.raises(UserError, match=r"no split tset\. Did you mean test"):
        data.split(splits, "tset")


def test_an_empty_split_is_refused() -> None:
    with pytest.raises(UserError, match="split train of the data set is empty"):
        data.split(DatasetDict(train=Dataset.from_dict({"text": []})), "train")


def test_messages_need_a_template(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="no chat template"):
        data.tokenize(data.split(data.load(str(CHAT_DATA)), "test"), tokenizer, max_length=64)


def test_an_unknown_file_ending_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.xlsx"
    path.touch()
    with pytest.raises(UserError, match="unknown ending"):
        data.load(str(path))


def test_the_shipped_chats_are_unique_and_well_formed() -> None:
    rows = [
        json.loads(line)
        for name in ("train", "test")
        for line in (CHAT_DATA / f"{name}.jsonl").read_text().splitlines()
    ]
    assert len(rows) >= 150
    assert len({row["messages"][0]["content"] for row in rows}) == len(rows)
    for row in rows:
        assert [turn["role"] for turn in row["messages"]] == ["user", "assistant"] * (len(row["messages"]) // 2)
        assert all(len(turn["content"].split()) >= 5 for turn in row["messages"] if turn["role"] == "assistant")
