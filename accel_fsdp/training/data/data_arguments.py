"""The flags of `train/sft.py` about its data: data sets, columns, tokenisation."""

from dataclasses import dataclass
from typing import Literal

from transformers.hf_argparser import HfArg

from accel_fsdp.errors import UsageError


@dataclass
class DataArguments:
    """The training data."""

    dataset_name: str = HfArg(help="Hub id, local folder, or a .jsonl, .json, .csv or .parquet file.")
    dataset_config: str | None = HfArg(default=None, help="Configuration of a hub data set.")
    dataset_train_split: str = HfArg(default="train", help="Split to train on.")
    dataset_test_split: str = HfArg(default="test", help="Split for evaluation (--eval_strategy).")
    streaming: bool = HfArg(
        default=False, help="Read the training split while training, again and again. Needs --max_steps."
    )
    streaming_buffer: int = HfArg(default=1000, help="Rows of a stream that are shuffled, and packed, together.")
    columns: list[str] = HfArg(
        default_factory=list,
        help="Columns with unusual names, as PART=COLUMN. The parts: messages; prompt and "
        "completion; instruction, input and output.",
    )
    dataset_text_field: str = HfArg(default="text", help="Column of plain text.")
    chat_template_path: str | None = HfArg(
        default=None, help="Jinja file, or model whose chat template is used in place of this model's."
    )
    assistant_only_loss: bool = HfArg(default=False, help="Train only on the assistant's text and its end tokens.")
    completion_only_loss: bool | None = HfArg(
        default=None, help="Train the completion without its prompt. Default: yes where rows have such parts."
    )
    max_length: int = HfArg(default=1024, help="Tokens per row, also of a packed one.")
    truncation_mode: Literal["keep_start", "keep_end", "drop"] = HfArg(
        default="keep_start", help="How to treat a longer row; such rows are counted."
    )
    packing: bool = HfArg(
        default=False,
        help="Put several rows into one of max_length tokens. No row is cut, rows don't attend to each other, and "
        "the loss is the same.",
    )
    dataset_num_proc: int | None = HfArg(
        default=None, help="Processes that tokenize. Default: one per core, fewer for little data."
    )

    def named_columns(self) -> dict[str, str]:
        pairs = [entry.partition("=") for entry in self.columns]
        for (part, equals, column), entry in zip(pairs, self.columns, strict=True):
            if not (part and equals and column):
                raise UsageError(
                    f"--columns {entry} is not PART=COLUMN",
                    why="the column's part is ambiguous",
                    fix="such as --columns prompt=question completion=answer",
                )
        return {part: column for part, _, column in pairs}
