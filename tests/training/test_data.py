"""Data sets to tokens, compared with the tokenizer used directly."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import CHAT_DATA, ROOT
from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from accel_fsdp.errors import UserError
from accel_fsdp.training.data import DataArguments, chat_template, load, tokenizing


@pytest.fixture
def tokenizer(tiny_model: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model)


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def tokens_of(path: Path, tokenizer: PreTrainedTokenizerBase, **flags: Any) -> tuple[Dataset, str]:
    options = DataArguments(str(path), **{"max_length": 256, **flags})
    tokenized, summary = tokenizing.tokenize(load.split(load.load(str(path)), "train"), tokenizer, options)
    return tokenized, str(summary)


def texts_of(path: Path, tokenizer: PreTrainedTokenizerBase, **flags: Any) -> list[str]:
    return [tokenizer.decode(row["input_ids"]) for row in tokens_of(path, tokenizer, **flags)[0]]


def test_chats_go_through_the_template(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "Is it sharded?"}, {"role": "assistant", "content": "Yes."}]
    path = write(tmp_path / "chat.jsonl", {"messages": turns})
    tokens, summary = tokens_of(path, tokenizer)
    text = "<|im_start|>user\nIs it sharded?<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n"
    assert tokens[0]["input_ids"] == tokenizer(text)["input_ids"]
    assert tokens[0]["labels"] == tokens[0]["input_ids"]
    assert summary == f"1 row, {len(tokens[0]['input_ids'])} tokens"


def test_text_ends_with_the_end_token_and_long_rows_are_cut_or_dropped(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    path = write(tmp_path / "text.jsonl", {"body": "short"}, {"body": "long " * 50})
    short = [*tokenizer("short")["input_ids"], tokenizer.eos_token_id]
    long = [*tokenizer("long " * 50)["input_ids"], tokenizer.eos_token_id]
    for mode, kept in (("keep_start", long[:20]), ("keep_end", long[-20:]), ("drop", None)):
        tokens, summary = tokens_of(path, tokenizer, max_length=20, dataset_text_field="body", truncation_mode=mode)
        assert tokens["input_ids"][:] == ([short, kept] if kept else [short])
        assert ("1 row cut at the length limit" if kept else "1 longer row dropped") in summary
        assert f"{len(short) + (20 if kept else 0)} tokens" in summary


@pytest.mark.parametrize("kind", ["json", "parquet", "csv", "saved", "folder"])
def test_every_format_gives_the_same_tokens(kind: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    rows = Dataset.from_dict({"text": ["one", "two, 2", 'three "3"\nlines']})
    path = tmp_path / f"rows.{kind}"
    if kind == "saved":
        rows.save_to_disk(path)
    elif kind == "folder":
        path.mkdir()
        rows.to_parquet(path / "train.parquet")
        rows.to_parquet(path / "test.parquet")
    else:
        getattr(rows, f"to_{kind}")(path)
    assert texts_of(path, tokenizer) == [f"{text}<|im_end|>" for text in rows["text"]]


@pytest.mark.parametrize(
    ("row", "flags", "text"),
    [
        ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]}, {}, "CHAT"),
        ({"conversation": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}, {}, "CHAT"),
        ({"instruction": "Hi", "context": "", "response": "Ho", "category": "x"}, {}, "CHAT"),
        ({"question": "Hi", "reply": "Ho"}, {"columns": ["instruction=question", "output=reply"]}, "CHAT"),
        ({"text": "x", "q": "Hi", "a": " Ho"}, {"columns": ["prompt=q", "completion=a"]}, "Hi Ho<|im_end|>"),
        ({"messages": [], "body": "Hi"}, {"dataset_text_field": "body"}, "Hi<|im_end|>"),
        ({"prompt": "p", "messages": [{"role": "user", "content": "Hi"}]}, {}, "<|im_start|>user\nHi<|im_end|>\n"),
    ],
)
def test_columns_are_found_or_named(
    row: dict[str, Any], flags: dict[str, Any], text: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    chat = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHo<|im_end|>\n"
    assert texts_of(write(tmp_path / "rows.jsonl", row), tokenizer, **flags) == [chat if text == "CHAT" else text]


def test_instructions_without_a_chat_template_are_alpacas(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    tokenizer.chat_template = None
    path = write(tmp_path / "rows.jsonl", {"instruction": "Add", "input": "1 1", "output": "2"})
    text = "### Instruction:\nAdd\n\n### Input:\n1 1\n\n### Response:\n2<|im_end|>"
    assert texts_of(path, tokenizer) == [text]


TURN = {"messages": [{"role": "user", "content": "Hi"}]}
PAIR = {"question": "a", "reply": "b"}
CALLS = {"role": "assistant", "tool_calls": [{"f": 1}]}


@pytest.mark.parametrize(
    ("rows", "flags", "message"),
    [
        ([PAIR], {"columns": ["prompt"]}, "prompt is not PART=COLUMN"),
        ([PAIR], {"columns": ["promt=question"]}, r"no part promt\. Did you mean prompt"),
        ([PAIR], {"columns": ["prompt=qestion"]}, r"no column qestion\. Did you mean question"),
        ([PAIR], {}, "neither messages, prompt and completion"),
        ([TURN, {"messages": "Hi"}], {}, "row 2: messages is not a list of turns with role and content"),
        ([TURN, {"messages": [{"role": "user"}]}], {}, 'row 2: .*content as text, such as {"role": "user"'),
        ([TURN, {"messages": [{**CALLS, "content": ""}]}], {}, "row 2: a turn of messages has tool calls, which"),
        ([TURN, {"messages": [{**CALLS, "content": None}]}], {}, "row 2: a turn of messages has tool calls, which"),
        ([{"text": "a"}], {"assistant_only_loss": True}, "_only_loss, but the rows"),
        ([{"text": "a"}], {"completion_only_loss": True}, "_only_loss, but the rows"),
        ([TURN], {"completion_only_loss": True}, "_only_loss, but the rows"),
        ([{"prompt": "a", "completion": "b"}], {"assistant_only_loss": True}, "_only_loss, but the rows"),
    ],
)
def test_rows_that_can_not_be_meant_are_refused(
    rows: list[object], flags: dict[str, Any], message: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        tokens_of(write(tmp_path / "rows.jsonl", *rows), tokenizer, **flags)


@pytest.mark.parametrize("more", ["", r" \(2 such rows\)"])
def test_a_corrupt_row_is_named(more: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """In a folder of several files the number is that of the split."""
    good, bad = ({"messages": [{"role": "user", "content": content}]} for content in ("a", None))
    folder = tmp_path / "train"
    folder.mkdir()
    write(folder / "one.jsonl", good, good)
    write(folder / "two.jsonl", good, *[bad] * (2 if more else 1))
    for path, place in ((tmp_path, "split train, row 4"), (folder / "two.jsonl", r"two\.jsonl, row 2")):
        with pytest.raises(UserError, match=f"{place}: messages is not a list of turns.*{more}"):
            tokens_of(path, tokenizer)


def test_a_broken_file_is_refused(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n{"text" "b"}\n')
    with pytest.raises(UserError, match=r"cannot load data set .*rows\.jsonl: JSON parse error: .*in row 1"):
        load.load(str(path))
    path.write_text('{"text": "a"}\n' * 40_000 + '{"text" "b"}\n')  # beyond the first block that is parsed
    rows = load.split(load.load(str(path), streaming=True), "train")
    with pytest.raises(UserError, match="JSON parse error"), load.reading(str(path)):
        list(tokenizing.stream(rows, tokenizer, DataArguments(str(path), streaming=True), seed=0))


def test_a_bad_row_of_a_stream_is_shown(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "a"}]
    path = write(tmp_path / "rows.jsonl", {"messages": turns}, {"messages": [{"role": "user", "content": None}]})
    rows = load.split(load.load(str(path), streaming=True), "train")
    with pytest.raises(UserError, match=r"a row of .*rows.jsonl, .*: messages is not a list of turns"):
        list(tokenizing.stream(rows, tokenizer, DataArguments(str(path), streaming=True), seed=0).take(9))
    assert len(load.whole(rows)) == 2


@pytest.mark.parametrize(
    ("full", "empty"),
    [
        ({"text": "a"}, [{"text": ""}, {"text": " \n"}, {"text": None}]),
        ({"prompt": "a", "completion": "b"}, [{"prompt": "", "completion": ""}, {"prompt": "a", "completion": None}]),
        ({"instruction": "a", "output": "b"}, [{"instruction": "a", "output": None}]),
        ({"messages": [{"role": "user", "content": "a"}]}, [{"messages": []}, {"messages": None}]),
    ],
)
def test_empty_rows_are_dropped_and_counted(
    full: dict[str, Any], empty: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """Also the first one, which says how others are read; scraped data have some, and one of them ended the job."""
    path = write(tmp_path / "rows.jsonl", *empty, full, *empty, full)
    tokens, summary = tokens_of(path, tokenizer)
    (expected, _), _ = tokens_of(write(tmp_path / "full.jsonl", full, full), tokenizer)
    assert tokens["input_ids"][:] == [expected["input_ids"]] * 2
    assert f"{2 * len(empty)} empty rows dropped" in summary
    rows = load.split(load.load(str(path), streaming=True), "train")
    options = DataArguments(str(path), streaming=True, max_length=256)
    assert [list(row["input_ids"]) for row in tokenizing.stream(rows, tokenizer, options, seed=0).take(3)] == [
        expected["input_ids"]
    ] * 3


@pytest.mark.parametrize("name", ["data/tran.jsonl", "tran.jsonl", "data/rows.parquet"])
def test_a_file_that_is_not_there_is_no_matter_of_the_hub(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "train.jsonl", {"text": "a"})
    with pytest.raises(UserError, match="does not exist") as refused:
        load.load(name)
    assert "Hub" not in str(refused.value)
    if name == "data/tran.jsonl":
        assert "Did you mean train.jsonl?" in str(refused.value)
    with pytest.raises(UserError, match="there is no file or folder of that name here"):
        load.load("data/nothing")


def test_tokens_are_made_once_and_again_when_anything_changes(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """On several processes too, where the second call reads what the first wrote."""
    path = write(tmp_path / "rows.jsonl", *[{"text": f"row {n}"} for n in range(50)])

    def files(**flags: Any) -> list[tuple[str, int]]:
        tokens = tokens_of(path, tokenizer, **flags)[0]
        return [(file["filename"], Path(file["filename"]).stat().st_mtime_ns) for file in tokens.cache_files]

    first = files(dataset_num_proc=2)
    tokenizer("use changes a tokenizer's pickle", padding="max_length", truncation=True, max_length=9)
    assert files(dataset_num_proc=2) == first
    assert files(max_length=3) != first
    tokenizer.chat_template += "{# another #}"
    assert files(dataset_num_proc=2) != first
    together = tokens_of(path, tokenizer)[0]
    assert together[:] == tokens_of(path, tokenizer, dataset_num_proc=2)[0][:]


def test_messages_need_a_template(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="no chat template"):
        tokens_of(CHAT_DATA, tokenizer)
    chat_template.use_template(tokenizer, str(ROOT / "tests" / "templates" / "smollm2.jinja"))
    assert texts_of(CHAT_DATA, tokenizer)[0].startswith("<|im_start|>system\nYou are a helpful")
    with pytest.raises(UserError, match="no chat template from nowhere"):
        chat_template.use_template(tokenizer, "nowhere")
