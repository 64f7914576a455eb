"""Converts rows of a data set to examples to tokenise: a chat, a prompt with its completion, or plain text."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from accel_fsdp.errors import UsageError, UserError, did_you_mean

T = TypeVar("T")
ALIASES = {
    "messages": ("messages", "conversations", "conversation"),
    "prompt": ("prompt",),
    "completion": ("completion",),
    "instruction": ("instruction",),
    "input": ("input", "context"),
    "output": ("output", "response"),
}
"""The columns that are found without a flag, the most usual name first; `--columns` names others."""

KINDS = {"messages": ("messages",), "pair": ("prompt", "completion"), "instruction": ("instruction", "output")}
ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant"}
"""Chat-template roles for the values of ShareGPT's `from`."""

ALPACA = "### Instruction:\n{instruction}\n\n{input}### Response:\n"
ALPACA_INPUT = "### Input:\n{input}\n\n"
"""For models without a chat template: the prompt that Stanford Alpaca and its descendants were trained with."""


class BadRow(ValueError):
    """A row that can't be used for training; the text gives the reason."""


class Empty(BadRow):
    """A row without text, as scraped data have some: it is left out and counted."""


def or_bad_row(make: Callable[..., T], *arguments: Any) -> T | BadRow:
    """The result of `make`, or the BadRow that it raises, so that the other rows of the batch are still encoded."""
    try:
        return make(*arguments)
    except BadRow as bad:
        return bad


@dataclass(frozen=True)
class Chat:
    """Turns with role and content. The last `answers` assistant turns are the completion, where there is one."""

    messages: list[dict[str, Any]]
    answers: int | None = None


@dataclass(frozen=True)
class Pair:
    """A prompt and its completion, both plain text."""

    prompt: str
    completion: str


Example = Chat | Pair | str


@dataclass(frozen=True)
class RowReader:
    """Turns one row into an example. `column` names the column of each part of the row."""

    kind: str
    column: Mapping[str, str]
    chats: bool

    @property
    def has_completion(self) -> bool:
        """Whether the rows have a prompt and a completion, so that the loss can leave out the prompt."""
        return self.kind in ("pair", "instruction")

    def __call__(self, row: Mapping[str, Any]) -> Example:
        """Reads a row. Raises `Empty` for a part without text, `BadRow` for one of another type."""
        parts = {part: row[column] for part, column in self.column.items()}
        if self.kind == "messages":
            return Chat(_turns(parts["messages"], self.column["messages"]))
        if self.kind == "pair":
            return _pair(parts["prompt"], parts["completion"])
        if self.kind == "instruction":
            return self._instruction(parts)
        return _text(parts["text"], self.column["text"])

    def _instruction(self, row: Mapping[str, Any]) -> Example:
        instruction = _read_prompt(row["instruction"], self.column["instruction"])
        output = _text(row["output"], self.column["output"])
        extra = row.get("input") or ""
        if self.chats:
            return _question_chat("\n\n".join(filter(None, (instruction, extra))), output)
        extra_part = ALPACA_INPUT.format(input=extra) if extra else ""
        return Pair(ALPACA.format(instruction=instruction, input=extra_part), output)


def reader(
    columns: Sequence[str],
    *,
    chats: bool,
    named: Mapping[str, str] | None = None,
    text_field: str = "text",
) -> RowReader:
    """Chooses how rows with these columns are read; the user's names take precedence over the usual ones.

    `chats`: the tokenizer has a chat template, so an instruction becomes a user's turn and an output the assistant's.
    """
    named = dict(named or {})
    _check_named(named, columns)
    column = {part: named.get(part) or _first_present(names, columns) for part, names in ALIASES.items()}
    named_columns = {part: name for part, name in column.items() if name}
    kinds = [kind for kind, parts in KINDS.items() if all(part in named_columns for part in parts)]
    named_kinds = [kind for kind in kinds if set(named) & {*KINDS[kind], "input"}]
    if text_field in columns and not named_kinds and (text_field != "text" or not kinds):
        return RowReader("text", {"text": text_field}, chats)
    if not (named_kinds or kinds):
        raise _no_columns(columns, text_field)
    kind = (named_kinds or kinds)[0]
    parts = (*KINDS[kind], "input") if kind == "instruction" else KINDS[kind]
    return RowReader(kind, {part: named_columns[part] for part in parts if part in named_columns}, chats)


def _first_present(names: Sequence[str], columns: Sequence[str]) -> str | None:
    return next((name for name in names if name in columns), None)


def _check_named(column_names: Mapping[str, str], columns: Sequence[str]) -> None:
    for part, column in column_names.items():
        if part not in ALIASES:
            raise UsageError(
                f"--columns {part}={column}: there is no part {part}.{did_you_mean(part, ALIASES)}",
                why="it would have no effect",
                fix="one of: " + ", ".join(f"{name}=COLUMN" for name in ALIASES),
            )
        if column not in columns:
            raise UserError(
                f"the data set has no column {column}.{did_you_mean(column, columns)}",
                why=f"--columns {part}={column} names it",
                fix="one of: " + ", ".join(columns),
            )


def _no_columns(columns: Sequence[str], text_field: str) -> UserError:
    return UserError(
        f"the data set has neither messages, prompt and completion, instruction and output, nor {text_field}, only: "
        + ", ".join(columns),
        why="the text to train on is unknown",
        fix="name them, such as --columns prompt=question completion=answer, or --dataset_text_field COLUMN",
    )


def _question_chat(prompt: str, completion: str) -> Chat:
    return Chat([{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}], answers=1)


def _text(value: object, column: str) -> str:
    if value is None or (isinstance(value, str) and not value.strip()):
        raise Empty(f"{column} is empty")
    if not isinstance(value, str):
        raise BadRow(f"{column} is not a text")
    return value


def _pair(prompt: object, completion: object) -> Example:
    if isinstance(completion, list) and (prompt is None or isinstance(prompt, list)):
        answer = _turns(completion, "completion")
        before = _turns(prompt, "prompt") if prompt else []
        return Chat([*before, *answer], sum(turn["role"] == "assistant" for turn in answer))
    return Pair(_read_prompt(prompt, "prompt"), _text(completion, "completion"))


def _read_prompt(value: object, column: str) -> str:
    """Reads a prompt, which may be empty: then the answer is trained as plain text."""
    return "" if value is None else _text(value, column) if str(value).strip() else str(value)


def _turns(value: object, column: str) -> list[dict[str, Any]]:
    """Turns with the names that chat templates know; keys that Arrow filled with None are taken out again."""
    if value is None or value == []:
        raise Empty(f"{column} is empty")
    if not isinstance(value, list):
        raise BadRow(f"{column} is not a list of turns with role and content")
    return [_turn(turn, column) for turn in value]


def _turn(turn: object, column: str) -> dict[str, Any]:
    parts = {key: part for key, part in turn.items() if part is not None} if isinstance(turn, dict) else {}
    if "from" in parts and "value" in parts:
        parts = {"role": parts["from"], "content": parts["value"]}
    if parts.get("tool_calls"):
        raise BadRow(f"a turn of {column} has tool calls, which are not supported")
    role, content = parts.get("role"), parts.get("content")
    if not isinstance(role, str) or not isinstance(content, str):
        raise BadRow(
            f"{column} is not a list of turns with role and content as text, "
            'such as {"role": "user", "content": "Hi"}'
        )
    return {**parts, "role": ROLES.get(role, role)}
