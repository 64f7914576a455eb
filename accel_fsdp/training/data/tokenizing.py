"""Tokenises a split, on all cores and once; keeps, cuts, drops or refuses rows, and counts them for a check."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from accel_fsdp.errors import UsageError, UserError
from accel_fsdp.hardware import host
from accel_fsdp.training.data import chat_template, columns, encoding, load, packing
from accel_fsdp.training.data.data_arguments import DataArguments
from accel_fsdp.training.data.encoding import Encoder, batch_rows

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from transformers import PreTrainedTokenizerBase

ROWS_PER_PROCESS = 2000
"""The fewest rows of a process, which takes about half a second to start: with fewer it would save less than that."""

STREAMED = 100
"""Rows of a stream that are tokenised together: enough for the tokenizer's threads, soon enough for the first step."""

TOO_LONG, NO_TURN = "the prompts fill the length limit", "no turn is an assistant's"
"""Reasons to drop a row, for the case that no row is left."""

KEPT = ["input_ids", "labels"]


@dataclass(frozen=True)
class TokenSummary:
    """The numbers of a tokenised split, for the user to check before hours of training.

    `lengths` are those of the rows, `packed` those of the rows they were packed into. `batch_size` is a rank's, for the
    share of padding in its batches; None: without that share.
    """

    lengths: "np.ndarray[Any, Any]"
    packed: "np.ndarray[Any, Any] | None"
    trained: int
    truncated_rows: int
    dropped_long: int
    dropped_untrained: int
    dropped_empty: int
    batch_size: int | None

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def longest(self) -> int:
        return int(self.lengths.max())

    def __str__(self) -> str:
        rows = len(self.lengths)
        counts = {
            "of them trained": self.trained if self.trained < self.tokens - rows else 0,
            "rows cut at the length limit": self.truncated_rows,
            "longer rows dropped": self.dropped_long,
            "empty rows dropped": self.dropped_empty,
            "rows dropped that had no token to train": self.dropped_untrained,
        }
        changes = [f"{n:,} {what if n > 1 else what.replace('rows', 'row')}" for what, n in counts.items() if n]
        parts = [f"{rows:,} row{'s' if rows > 1 else ''}, {self.tokens:,} tokens", *changes]
        if self.packed is not None:
            parts.append(f"packed into {len(self.packed):,}")
        if self.batch_size is not None:
            batched = [lengths for lengths in (self.lengths, self.packed) if lengths is not None]
            shares = [f"{packing.padding_share(lengths, self.batch_size):.1%}" for lengths in batched]
            parts.append("padding " + " -> ".join(shares))
        return ", ".join(parts)


def tokenize(
    rows: "Dataset", tokenizer: "PreTrainedTokenizerBase", options: DataArguments, batch_size: int | None = None
) -> "tuple[Dataset | packing.Packed, TokenSummary]":
    """Turns rows into `input_ids` (at most `max_length`) and `labels` (-100 where nothing is trained).

    The result is kept in the data set's cache under a fingerprint of rows, tokenizer, options and this code, so that
    only the first process of a node works. Rows without a token to train, such as a prompt that fills the limit, are
    dropped and counted.

    Raises:
        UserError: no usable columns, a malformed row (named by file and number), messages without a chat template, a
            template whose assistant turns can't be found, no row left, or a full disk.
    """
    encoder = _first_encoder(rows, tokenizer, options, lambda number: _place(rows, number, options))
    processes = options.dataset_num_proc or max(1, min(host.cores(), len(rows) // ROWS_PER_PROCESS))
    with load.filling_cache(options.dataset_name):
        encoded = rows.map(
            encoder,
            batched=True,
            remove_columns=rows.column_names,
            num_proc=processes if processes > 1 else None,  # 1 would start a process too
            new_fingerprint=_digest(rows, encoder),
            desc="Tokenizing",
        )
        _refuse_bad_rows(encoded, rows, options)
        return _only_trained(encoded, options, batch_size)


def stream(
    rows: "IterableDataset", tokenizer: "PreTrainedTokenizerBase", options: DataArguments, seed: int
) -> "IterableDataset":
    """Tokenises rows as a stream, repeatedly and shuffled within a buffer.

    Nothing is cached or counted, and a bad row stops the run when it is reached.
    """
    first = next(iter(rows), None)
    if first is None:
        raise _nothing_left(options, "it has no rows")
    encoder = _first_encoder(rows, tokenizer, options, lambda number: f"row {number + 1} of {options.dataset_name}")

    def encode(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        encoded_batch = encoder(batch)
        for values, problem in zip(batch_rows(batch), encoded_batch["problem"], strict=True):
            if problem:
                raise _bad_row(f"a row of {options.dataset_name}, {str(values)[:200]}", problem)
        trained_rows = [row for row, trained in enumerate(encoded_batch["trained"]) if trained]
        return {name: [encoded_batch[name][row] for row in trained_rows] for name in KEPT}

    shuffled = rows.repeat(None).shuffle(seed=seed, buffer_size=options.streaming_buffer)
    encoded = shuffled.map(encode, batched=True, batch_size=STREAMED, remove_columns=list(first))
    return packing.pack_stream(encoded, options.max_length, options.streaming_buffer) if options.packing else encoded


def _first_encoder(
    rows: Iterable[Mapping[str, Any]],
    tokenizer: "PreTrainedTokenizerBase",
    options: DataArguments,
    place: Callable[[int], str],
) -> Encoder:
    """The encoder of the rows, chosen by the first one that isn't empty; `place` names a row for the user."""
    for number, row in enumerate(rows):
        try:
            return make_encoder(row, tokenizer, options)
        except columns.Empty:
            continue
        except columns.BadRow as bad:
            raise _bad_row(place(number), str(bad)) from bad
    raise _nothing_left(options, "all rows are empty")


def make_encoder(first: Mapping[str, Any], tokenizer: "PreTrainedTokenizerBase", options: DataArguments) -> Encoder:
    """Chooses how rows like this first one are read, written and masked.

    Raises:
        BadRow: the row itself is malformed.
        UserError: no usable columns, no chat template, or an impossible mask.
    """
    reader = columns.reader(
        list(first),
        chats=tokenizer.chat_template is not None,
        named=options.named_columns(),
        text_field=options.dataset_text_field,
    )
    is_conversation = isinstance(reader(first), columns.Chat)
    if is_conversation:
        chat_template.require_template(tokenizer)
    _check_masks(reader, is_conversation, options)
    completion_only = reader.has_completion if options.completion_only_loss is None else options.completion_only_loss
    masked = is_conversation and (options.assistant_only_loss or completion_only)
    if masked and not tokenizer.is_fast:
        raise UserError(
            "the tokenizer can't say which letters a token stands for",
            why="the assistant's tokens couldn't be distinguished from the user's",
            fix="a model with a tokenizer.json, or --completion_only_loss false without --assistant_only_loss",
        )
    return Encoder(
        tokenizer=tokenizer,
        reader=reader,
        max_length=options.max_length,
        truncation=options.truncation_mode,
        masked=masked,
        completion_only=completion_only,
        marks=chat_template.marks(tokenizer) if masked else None,
    )


def _check_masks(reader: columns.RowReader, is_conversation: bool, options: DataArguments) -> None:
    if options.assistant_only_loss and not is_conversation:
        raise UsageError(
            "--assistant_only_loss, but the rows are not conversations",
            why="plain text has no assistant turns",
            fix="leave it out" + (", --completion_only_loss true trains the answers" if reader.has_completion else ""),
        )
    if options.completion_only_loss and not reader.has_completion:
        raise UsageError(
            "--completion_only_loss, but the rows have no prompt and completion",
            why="the rows have no prompt to leave out of the loss",
            fix="--assistant_only_loss true" if is_conversation else "leave it out, or name the columns",
        )


def _digest(rows: "Dataset", encoder: Encoder) -> str:
    """A hash of everything that the result depends on.

    The tokenizer counts by its content, because its pickle changes with use, as do the settings for padding and
    truncation that each call leaves behind.
    """
    from transformers import __version__

    tokenizer = encoder.tokenizer
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content: dict[str, Any] = json.loads(backend.to_str()) if backend is not None else tokenizer.get_vocab()
    parts = [json.dumps({name: part for name, part in content.items() if name not in ("padding", "truncation")})]
    parts += [Path(str(module.__file__)).read_text() for module in (columns, chat_template, encoding)]
    parts += [repr(replace(encoder, tokenizer=None)), repr(tokenizer.chat_template), repr(tokenizer.special_tokens_map)]
    digest = hashlib.blake2b(digest_size=16)
    for part in (rows._fingerprint, __version__, *parts):
        digest.update(part.encode())
    return digest.hexdigest()


def _refuse_bad_rows(encoded: "Dataset", rows: "Dataset", options: DataArguments) -> None:
    problems = encoded["problem"][:]
    bad_rows = [number for number, problem in enumerate(problems) if problem]
    if bad_rows:
        note = f" ({len(bad_rows):,} such rows)" if len(bad_rows) > 1 else ""
        raise _bad_row(_place(rows, bad_rows[0], options), problems[bad_rows[0]] + note)


def _place(rows: "Dataset", row: int, options: DataArguments) -> str:
    """The name of row `row` (from 0) for the user: that of a file, or of a data set's split, and its number from 1."""
    is_file = Path(options.dataset_name).is_file() or not rows.split
    return f"{options.dataset_name}, {'' if is_file else f'split {rows.split}, '}row {row + 1}"


def _bad_row(place: str, problem: str) -> UserError:
    return UserError(
        f"{place}: {problem}", why="the row can't be tokenized correctly", fix="correct or remove that row"
    )


def _nothing_left(options: DataArguments, reason: str) -> UserError:
    fix = "a larger --max_length, or --truncation_mode keep_end"
    if reason == NO_TURN:
        fix = "leave out --assistant_only_loss, or give conversations in which the role assistant speaks"
    elif reason != TOO_LONG:
        fix = "other data, or another column: --dataset_text_field, --columns"
    return UserError(
        f"no row of {options.dataset_name} has a token to train on: {reason}",
        why="training would change nothing",
        fix=fix,
    )


def _only_trained(
    encoded: "Dataset", options: DataArguments, batch_size: int | None
) -> "tuple[Dataset | packing.Packed, TokenSummary]":
    """Drops rows without trained tokens, packs the others if asked to, and counts both."""
    length, trained = np.asarray(encoded["length"][:]), np.asarray(encoded["trained"][:])
    too_long = length > options.max_length
    dropped_long = too_long & (options.truncation_mode == "drop")
    keep = (trained > 0) & ~dropped_long
    empty = length == 0
    if not keep.any():
        reason = NO_TURN if options.assistant_only_loss else "none has a token to predict"
        raise _nothing_left(options, "all rows are empty" if empty.all() else TOO_LONG if too_long.any() else reason)
    kept_columns = encoded.select_columns(KEPT)
    if not keep.all():
        kept_columns = kept_columns.select(np.flatnonzero(keep))
    lengths = np.minimum(length[keep], options.max_length)
    packed = packing.Packed(kept_columns, lengths, options.max_length) if options.packing else None
    summary = TokenSummary(
        lengths=lengths,
        packed=packed.lengths if packed else None,
        trained=int(trained[keep].sum()),
        truncated_rows=int((too_long & keep).sum()),
        dropped_long=int(dropped_long.sum()),
        dropped_untrained=int((~keep & ~dropped_long & ~empty).sum()),
        dropped_empty=int(empty.sum()),
        batch_size=batch_size,
    )
    return packed or kept_columns, summary
