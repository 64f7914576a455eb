"""Data sets to tokens: chat messages through the tokenizer's template, or plain text."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_fsdp.errors import UserError, did_you_mean
from accel_fsdp.facts import check_local_path, first_line

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict
    from transformers import PreTrainedTokenizerBase

MESSAGES = "messages"
FILE_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


@dataclass(frozen=True)
class TokenSummary:
    """What tokenising made of a split, for the user to check before hours of training."""

    rows: int
    tokens: int
    truncated_rows: int

    def __str__(self) -> str:
        cut = f", {self.truncated_rows} cut at the length limit" if self.truncated_rows else ""
        return f"{self.rows:,} rows, {self.tokens:,} tokens{cut}"


def load(name: str, config_name: str | None = None) -> "DatasetDict":
    """Loads all splits of a hub data set, a local folder (files named after their split) or one local file.

    Raises:
        UserError: it doesn't exist or its files can't be parsed.
    """
    from datasets import DatasetDict, load_dataset
    from datasets.exceptions import DatasetGenerationError

    check_local_path(name, "data set")
    path = Path(name)
    try:
        loaded = load_dataset(_builder(path), data_files=name) if path.is_file() else load_dataset(name, config_name)
    except (DatasetGenerationError, FileNotFoundError, ValueError, ConnectionError, StopIteration) as error:
        cause = str(error.__cause__ or error) or "it has no rows"
        raise UserError(
            f"cannot load data set {name}: {first_line(Exception(cause))}",
            why="there is nothing to train on",
            fix="give a hub id, a folder with train.jsonl, or a valid .jsonl, .json, .csv or .parquet file",
        ) from error
    assert isinstance(loaded, DatasetDict)
    return loaded


def _builder(path: Path) -> str:
    if path.suffix not in FILE_BUILDERS:
        raise UserError(
            f"data file {path} has an unknown ending",
            why="its format can't be told",
            fix="rename it to one of: " + ", ".join(FILE_BUILDERS),
        )
    return FILE_BUILDERS[path.suffix]


def split(data: "DatasetDict", name: str) -> "Dataset":
    """Returns one split that has rows.

    Raises:
        UserError: no such split, or it is empty.
    """
    if name not in data:
        raise UserError(
            f"the data set has no split {name}.{did_you_mean(name, data)}",
            why="training needs it",
            fix="--dataset_train_split or --dataset_test_split with one of: " + ", ".join(data),
        )
    if len(data[name]) == 0:
        raise UserError(
            f"split {name} of the data set is empty",
            why="there is nothing to train on",
            fix="give a data set with rows",
        )
    return data[name]


def tokenize(
    data: "Dataset", tokenizer: "PreTrainedTokenizerBase", *, max_length: int, text_field: str = "text"
) -> "tuple[Dataset, TokenSummary]":
    """Turns rows into `input_ids` (at most `max_length`) and `labels` (a copy: every token is trained).

    Rows with `messages` go through the tokenizer's chat template, rows with `text_field` are plain text that gets an
    end-of-sequence token.

    Raises:
        UserError: neither column, a malformed row (named by its number), or messages without a chat template.
    """
    chat = _is_chat(data, text_field)
    if chat and tokenizer.chat_template is None:
        raise UserError(
            "the tokenizer has no chat template, but the data set has messages",
            why="nobody can know how this model wants its turns marked",
            fix="use the instruct version of the model, or a data set with a text column",
        )

    def encode(row: dict[str, Any], index: int) -> dict[str, Any]:
        ids = _encode_chat(row, index, tokenizer) if chat else _encode_text(row, index, tokenizer, text_field)
        return {"input_ids": ids[:max_length], "labels": ids[:max_length], "length": len(ids)}

    encoded = data.map(encode, with_indices=True, remove_columns=data.column_names, desc="Tokenizing")
    lengths = encoded["length"]
    summary = TokenSummary(
        rows=len(encoded),
        tokens=sum(min(length, max_length) for length in lengths),
        truncated_rows=sum(length > max_length for length in lengths),
    )
    return encoded.remove_columns("length"), summary


def _is_chat(data: "Dataset", text_field: str) -> bool:
    if MESSAGES in data.column_names:
        return True
    if text_field in data.column_names:
        return False
    raise UserError(
        f"the data set has neither a {MESSAGES} nor a {text_field} column, only: " + ", ".join(data.column_names),
        why="chat turns or plain text are needed to train on",
        fix=f"rename a column to {MESSAGES} or text, or name the text column with --dataset_text_field",
    )


def _encode_chat(row: dict[str, Any], index: int, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    messages = row[MESSAGES]
    complete = isinstance(messages, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages
    )
    if not (messages and complete):
        raise _bad_row(
            index,
            f"{MESSAGES} is not a list of turns with role and content",
            'role and content as text, e.g. {"role": "user", "content": "Hi"}; tool calls are not supported',
        )
    return list(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False))


def _encode_text(row: dict[str, Any], index: int, tokenizer: "PreTrainedTokenizerBase", text_field: str) -> list[int]:
    if not isinstance(row[text_field], str) or not row[text_field]:
        raise _bad_row(index, f"{text_field} is not a text", "fill it, or drop the row")
    ids: list[int] = tokenizer(row[text_field])["input_ids"]
    eos = tokenizer.eos_token_id
    return ids if eos is None or ids[-1:] == [eos] else [*ids, eos]


def _bad_row(index: int, what: str, fix: str) -> UserError:
    return UserError(f"row {index + 1} of the data set: {what}", why="training on it would teach nonsense", fix=fix)
