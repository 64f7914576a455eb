"""Makes batches from rows, and checks that packed documents don't attend to each other.

The documents of a packed row are distinguished by their position ids, which begin at 0 in each: transformers builds the
attention mask of eager, sdpa and flex attention from them if a batch has no `attention_mask`, and FlashAttention's
boundaries if the batch is one long row.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler
from transformers import TrainerCallback, TrainingArguments

from accel_fsdp.errors import UserError
from accel_fsdp.launch_environment import LaunchEnvironment
from accel_fsdp.training.data import packing
from accel_fsdp.training.data.encoding import IGNORED

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedTokenizerBase

ROUNDING = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
"""The possible rounding error of a prediction: 8 times that of the dtype. Predictions of a dense model don't change at
all; mixed experts are computed in groups that depend on the other tokens."""


@dataclass(frozen=True)
class Collator:
    """Makes a batch of rows: padded on the right, or `flat`, all in one row, which FlashAttention needs if packed.

    `positions` is the length of the longest document that the model takes; 0: any.
    Rows without labels fill a batch (`RowsAndNone`): they are left out, or if there are no others, count nothing.
    """

    pad_token_id: int
    packed: bool = False
    flat: bool = False
    positions: int = 0

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, "Tensor"]:
        """Returns `input_ids`, `labels`, and `attention_mask` or, packed, `position_ids`; int64, [rows, longest].

        Raises:
            UserError: no token of the batch is trained, so that its loss would be 0/0; or a document of a stream is
            longer than `positions`.
        """
        labelled = [row for row in rows if "labels" in row]
        rows = labelled or [{**rows[0], "labels": np.full_like(rows[0]["input_ids"], IGNORED)}]
        parts = {name: [np.asarray(row[name]) for row in rows] for name in ("input_ids", "labels")}
        if labelled and not any((labels[1:] != IGNORED).any() for labels in parts["labels"]):
            raise UserError(
                "a batch has no token to train on",
                why="no token that the model predicts has a label, so the batch's loss is 0/0",
                fix="give rows with labels, or a larger --max_length",
            )
        if self.packed:
            parts["position_ids"] = [np.asarray(row["position_ids"]) for row in rows]
            self.check_length(max(int(places.max()) + 1 for places in parts["position_ids"]))
        else:
            self.check_length(max(map(len, parts["input_ids"])))
            parts["attention_mask"] = [np.ones_like(ids) for ids in parts["input_ids"]]
        if self.flat:
            return {name: _tensor(np.concatenate(lines)[None]) for name, lines in parts.items()}
        padding = {"input_ids": self.pad_token_id, "labels": IGNORED, "attention_mask": 0, "position_ids": None}
        return {name: _tensor(_padded(lines, padding[name])) for name, lines in parts.items()}

    def check_length(self, longest: int) -> None:
        """Refuses a document with more tokens than the model has positions."""
        if self.positions and longest > self.positions:
            raise UserError(
                f"a row has {longest:,} tokens, and the model {self.positions:,} positions",
                why="beyond them it fails with an index error, or trains on positions that it wasn't made for",
                fix=f"--max_length {self.positions}",
            )


def _padded(lines: Sequence["np.ndarray[Any, Any]"], fill: int | None) -> "np.ndarray[Any, Any]":
    """Pads lines to one length. Without `fill` the padding counts up from 0, as a document without effect on others."""
    table = np.empty((len(lines), max(map(len, lines))), np.int64)
    for row, line in zip(table, lines, strict=True):
        row[: len(line)] = line
        row[len(line) :] = np.arange(len(row) - len(line)) if fill is None else fill
    return table


def _tensor(table: "np.ndarray[Any, Any]") -> "Tensor":
    return torch.from_numpy(table.astype(np.int64, copy=False))


def collator(tokenizer: "PreTrainedTokenizerBase", model: "nn.Module", packed: bool, longest: int = 0) -> Collator:
    """The collator that fits the model's attention. Any padding token is fine: its value isn't read."""
    from transformers.utils.generic import is_flash_attention_requested

    config: Any = model.config
    pad = 0 if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)
    positions = getattr(config.get_text_config(), "max_position_embeddings", None) or 0
    result = Collator(pad, packed, flat=packed and is_flash_attention_requested(config), positions=positions)
    result.check_length(longest)
    return result


NO_ROW = -1
"""The index that fills a batch."""


class RowsAndNone:
    """Rows, and at `NO_ROW` one without labels, for ranks without a remaining row."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return iter(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = dict(self.rows[0 if index == NO_ROW else index])
        if index == NO_ROW:
            del row["labels"]
        return row


class EvenBatches(BatchSampler):
    """The batches of another sampler, filled so that each of `ranks` gets the same number, all of one size.

    Accelerate fills them with rows from the beginning, which would count twice, and differ between ranks.
    """

    def __init__(self, batches: BatchSampler, ranks: int) -> None:
        super().__init__(batches.sampler, batches.batch_size, batches.drop_last)
        self.batches, self.ranks = batches, ranks

    def __iter__(self) -> Iterator[list[int]]:
        number = 0
        for batch in self.batches:
            number += 1
            yield [*batch, *[NO_ROW] * (self.batch_size - len(batch))]
        for _ in range(-number % self.ranks):
            yield [NO_ROW] * self.batch_size

    def __len__(self) -> int:
        return -(-len(self.batches) // self.ranks) * self.ranks


def even_out(loader: Any, keep_last: bool = False) -> Any:
    """Keeps a prepared loader of several ranks from repeating rows, and with `keep_last` from dropping any."""
    shared: Any = getattr(loader, "batch_sampler", None)
    batches = getattr(shared, "batch_sampler", shared)
    if keep_last and shared is not None:
        batches.drop_last = shared.drop_last = False
    if isinstance(shared, BatchSamplerShard) and type(batches) is BatchSampler and not batches.drop_last:
        shared.batch_sampler = EvenBatches(batches, 1 if shared.split_batches else shared.num_processes)
    return loader


class IsolationCheck(TrainerCallback):  # type: ignore[misc]
    """Refuses packed training, before the first step, if the model lets documents attend to each other.

    Recurrent and convolutional layers carry a state along the row, and some models make their mask without position
    ids. So the check runs the model as it will train: two forward passes of six tokens, on all ranks.
    """

    def __init__(self, collate: Collator) -> None:
        self.collate = collate

    def on_train_begin(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        """Changes the end of one document: the predictions for the next must not move."""
        model = kwargs["model"]
        training = model.training
        model.eval()
        before, after = (self._predictions(model, args, last) for last in (6, 7))
        model.train(training)
        if (after - before).abs().max() > ROUNDING[_compute_dtype(model)] * before.abs().max():
            raise UserError(
                f"--packing doesn't work with {type(model).__name__} and its attention",
                why="a document's predictions depend on the document before it in the row",
                fix="leave out --packing; --train_sampling_strategy group_by_length saves padding too",
            )

    def _predictions(self, model: "nn.Module", args: TrainingArguments, last: int) -> "Tensor":
        """The logits for the second document, next to the boundary: [3, vocabulary]."""
        documents = [np.asarray([2, 3, last]), np.asarray([3, 4, 5])]
        batch = self.collate([packing.joined(documents, documents)])
        with torch.no_grad():
            logits: Tensor = model(**{name: part.to(args.device) for name, part in batch.items()}).logits
        return logits[0, 3:].float()


def _compute_dtype(model: "nn.Module") -> torch.dtype:
    mixed = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
    stored = next(part.dtype for part in model.parameters() if part.is_floating_point())
    return mixed.get(LaunchEnvironment.now().mixed_precision, stored)
