"""Encodes examples as token ids and labels, batch by batch, in the processes of `datasets.map`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from accel_fsdp.training.data import chat_template
from accel_fsdp.training.data.columns import BadRow, Chat, Empty, Example, Pair, RowReader, or_bad_row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORED = -100
"""The label of a token that is not trained on, as PyTorch's cross entropy and Trainer know it."""

Truncation = Literal["keep_start", "keep_end", "drop"]


@dataclass(frozen=True)
class Encoded:
    """A row: its token ids, and the ranges of them that are trained on (None: all)."""

    ids: list[int]
    trained: list[chat_template.TextSpan] | None = None


@dataclass(frozen=True)
class Encoder:
    """The function for `datasets.map`: columns of a batch to `input_ids`, `labels` and the summary's counts.

    An unusable row gets the reason in `problem`. An exception would lose it on the way out of a worker process, and
    would name the row that failed first, not the first bad row.
    """

    tokenizer: "PreTrainedTokenizerBase"
    reader: RowReader
    max_length: int
    truncation: Truncation
    masked: bool
    completion_only: bool
    marks: chat_template.Marks | None

    def __call__(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        return _columns([self._ids_and_labels(row) for row in self.encode(batch_rows(batch))])

    def encode(self, rows: Sequence[Mapping[str, Any]]) -> list[Encoded | BadRow]:
        """Encodes rows in their order, before anything is cut; the tokenizer is called once for all of them."""
        parsed = [or_bad_row(self.reader, row) for row in rows]
        kind = next((type(example) for example in parsed if not isinstance(example, BadRow)), BadRow)
        other_kind = BadRow("it is of another kind than rows near it")
        parsed = [example if isinstance(example, kind | BadRow) else other_kind for example in parsed]
        examples = [example for example in parsed if not isinstance(example, BadRow)]
        encoded = iter(self._examples(examples))
        return [example if isinstance(example, BadRow) else next(encoded) for example in parsed]

    def _examples(self, examples: list[Example]) -> list[Encoded | BadRow]:
        if examples and isinstance(examples[0], Chat):
            return self._encode_chats([example for example in examples if isinstance(example, Chat)])
        if examples and isinstance(examples[0], Pair):
            return self._encode_pairs([example for example in examples if isinstance(example, Pair)])
        return [Encoded(self._with_eos(ids)) for ids in self._ids([str(example) for example in examples])]

    def _ids(self, texts: list[str], special: bool = True) -> list[list[int]]:
        if self.tokenizer.is_fast:
            return [encoding.ids for encoding in self._encodings(texts, special)]
        ids: list[list[int]] = self.tokenizer(texts, add_special_tokens=special)["input_ids"] if texts else []
        return ids

    def _encodings(self, texts: list[str], special: bool) -> list[Any]:
        """Calls the Rust tokenizer directly: transformers converts its result to columns, which doubles the time."""
        backend = self.tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        encodings: list[Any] = backend.encode_batch(texts, add_special_tokens=special)
        return encodings

    def _with_eos(self, ids: list[int]) -> list[int]:
        eos = self.tokenizer.eos_token_id
        return ids if eos is None or ids[-1:] == [eos] else [*ids, eos]

    def _encode_pairs(self, pairs: list[Pair]) -> list[Encoded | BadRow]:
        """Tokenises prompt and completion separately, as at inference: no token can be half prompt, half answer."""
        eos = self.tokenizer.eos_token_id
        prompts = self._ids([pair.prompt for pair in pairs])
        completions = self._ids([pair.completion for pair in pairs], special=False)
        encoded: list[Encoded | BadRow] = []
        for prompt, completion in zip(prompts, completions, strict=True):
            before = prompt[:-1] if eos is not None and prompt[-1:] == [eos] else prompt
            ids = [*before, *self._with_eos(completion)]
            encoded.append(Encoded(ids, [(len(before), len(ids))] if self.completion_only else None))
        return encoded

    def _encode_chats(self, rows: list[Chat]) -> list[Encoded | BadRow]:
        if not self.completion_only:
            rows = [replace(row, answers=None) for row in rows]
        written = chat_template.written(self.tokenizer, rows, self.marks, self.masked)
        texts = [chat[0] for chat in written if not isinstance(chat, BadRow)]
        if not self.masked:
            ids = iter(self._ids(texts, special=False))
            return [chat if isinstance(chat, BadRow) else Encoded(next(ids)) for chat in written]
        encodings = iter(self._encodings(texts, special=False))
        encoded = [
            chat if isinstance(chat, BadRow) else or_bad_row(_masked, next(encodings), *chat) for chat in written
        ]
        return self._check_decoding(encoded, written)

    def _check_decoding(
        self, encoded: list[Encoded | BadRow], written: list[tuple[str, list[chat_template.TextSpan]] | BadRow]
    ) -> list[Encoded | BadRow]:
        """Decodes every trained range and compares it with its text."""
        spans = [
            (row, row_encoded.ids[first:last], text[0][start:end])
            for row, (row_encoded, text) in enumerate(zip(encoded, written, strict=True))
            if not isinstance(row_encoded, BadRow) and not isinstance(text, BadRow)
            for (first, last), (start, end) in zip(row_encoded.trained or [], text[1], strict=True)
        ]
        decoded = self._decoded([ids for _, ids, _ in spans])
        proven = list(encoded)
        for (row, _, text), decoded_text in zip(spans, decoded, strict=True):
            if decoded_text.strip() != text.strip() and decoded_text.strip() != self._normalised(text):
                proven[row] = BadRow(f"the tokens of an assistant turn decode to {decoded_text!r}, not to {text!r}")
        return proven

    def _decoded(self, ids: list[list[int]]) -> list[str]:
        if not ids:  # transformers 5.23 decodes an empty list to one text
            return []
        texts: list[str] = self.tokenizer.batch_decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return texts

    def _normalised(self, text: str) -> str:
        """The text as the tokenizer writes it: some normalise letters or drop a leading space."""
        return self._decoded(self._ids([text], special=False))[0].strip()

    def _ids_and_labels(self, row: Encoded | BadRow) -> tuple["np.ndarray[Any, Any]", "np.ndarray[Any, Any]", int, str]:
        """Ids and labels within the length limit, the length before truncation, and the row's error."""
        if isinstance(row, BadRow):
            return _NONE, _NONE, 0, "" if isinstance(row, Empty) else str(row)
        ids = np.asarray(row.ids, np.int32)
        labels = ids
        if row.trained is not None:
            labels = np.full_like(ids, IGNORED)
            for first, last in row.trained:
                labels[first:last] = ids[first:last]
        if len(ids) <= self.max_length:
            return ids, labels, len(ids), ""
        kept_slice = {"keep_start": slice(self.max_length), "keep_end": slice(-self.max_length, None), "drop": slice(0)}
        part = kept_slice[self.truncation]
        return ids[part], labels[part], len(ids), ""


def batch_rows(batch: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """The rows of a batch that `datasets.map` gives by columns."""
    return [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]


_NONE = np.empty(0, np.int32)


def _columns(rows: list[tuple["np.ndarray[Any, Any]", "np.ndarray[Any, Any]", int, str]]) -> dict[str, list[Any]]:
    """The columns of encoded rows. The first token of a row is never predicted, so it counts as untrained."""
    return {
        "input_ids": [ids for ids, _, _, _ in rows],
        "labels": [labels for _, labels, _, _ in rows],
        "length": [length for _, _, length, _ in rows],
        "trained": [int(np.count_nonzero(labels[1:] != IGNORED)) for _, labels, _, _ in rows],
        "problem": [problem for _, _, _, problem in rows],
    }


def _masked(encoding: Any, text: str, spans: list[chat_template.TextSpan]) -> Encoded:
    return Encoded(encoding.ids, [_tokens(encoding, text, span) for span in spans])


def _tokens(encoding: Any, text: str, span: chat_template.TextSpan) -> chat_template.TextSpan:
    """The tokens of `text[start:end]`.

    A token that begins before the span belongs to it if only white space is outside, and does not if only white space
    is inside.
    """
    start, end = span
    first = _token_at(encoding, range(start, end))
    last = _token_at(encoding, range(end - 1, start - 1, -1))
    if first is None or last is None:
        raise BadRow("an assistant turn has no token of its own")
    while (after := encoding.token_to_chars(last + 1)) is not None and after[0] < end:  # several tokens form one letter
        last += 1
    begin, stop = encoding.token_to_chars(first)
    if text[begin:start].strip():
        raise BadRow(f"one token holds {text[begin:start]!r} and the assistant's first letters")
    if begin < start and not text[start:stop].strip():
        first += 1
    if unread := text[end : encoding.token_to_chars(last)[1]].strip():
        raise BadRow(f"one token holds the assistant's last letters and {unread!r}")
    return first, last + 1


def _token_at(encoding: Any, places: range) -> int | None:
    """The token of the first letter that belongs to a token; some tokenizers give white space no token."""
    tokens = (encoding.char_to_token(letter) for letter in places)
    return next((token for token in tokens if token is not None), None)
