"""The flags of `train/sft.py` about its data: what is read, how rows become tokens."""

from dataclasses import dataclass, field
from typing import Literal

from accel_fsdp.errors import UsageError


@dataclass
class DataArguments:
    """What it is trained on."""

    dataset_name: str = field(metadata={"help": "Hub id, local folder, or a .jsonl, .json, .csv or .parquet file."})
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a hub data set."})
    dataset_train_split: str = field(default="train", metadata={"help": "Split to train on."})
    dataset_test_split: str = field(default="test", metadata={"help": "Split for evaluation (--eval_strategy)."})
    streaming: bool = field(
        default=False,
        metadata={"help": "Read the training split while training, again and again. Needs --max_steps."},
    )
    streaming_buffer: int = field(
        default=1000, metadata={"help": "Rows of a stream that are shuffled, and packed, together."}
    )
    columns: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Columns that aren't found by themselves, as PART=COLUMN. The parts: messages; prompt and "
            "completion; instruction, input and output."
        },
    )
    dataset_text_field: str = field(default="text", metadata={"help": "Column of plain text."})
    prompt_template: str | None = field(
        default=None,
        metadata={
            "help": "Jinja text or file that makes the prompt from a row's columns, such as "
            r"'{{ question }}\n{{ options | lettered }}'. The model's chat template goes around it."
        },
    )
    completion_template: str | None = field(
        default=None,
        metadata={
            "help": "The same for the answer, such as '{{ \"ABCD\"[answer] }}'. Default: the column completion, "
            "output, answer or response."
        },
    )
    chat_template_path: str | None = field(
        default=None,
        metadata={"help": "Jinja file, or model whose chat template is used in place of this model's."},
    )
    assistant_only_loss: bool = field(
        default=False, metadata={"help": "Train what the assistant says and its end tokens, nothing else."}
    )
    completion_only_loss: bool | None = field(
        default=None,
        metadata={"help": "Train the completion without its prompt. Default: yes where rows have such parts."},
    )
    max_length: int = field(default=1024, metadata={"help": "Tokens per row, also of a packed one."})
    truncation_mode: Literal["keep_start", "keep_end", "drop"] = field(
        default="keep_start", metadata={"help": "What becomes of a longer row. It is counted."}
    )
    packing: bool = field(
        default=False,
        metadata={
            "help": "Put several rows into one of max_length tokens. None is cut for it, none sees another, and the "
            "loss is the same."
        },
    )
    dataset_num_proc: int | None = field(
        default=None, metadata={"help": "Processes that tokenize. Default: one per core, fewer for little data."}
    )

    def named_columns(self) -> dict[str, str]:
        """`--columns` as a mapping."""
        pairs = [entry.partition("=") for entry in self.columns]
        for (part, equals, column), entry in zip(pairs, self.columns, strict=True):
            if not (part and equals and column):
                raise UsageError(
                    f"--columns {entry} is not PART=COLUMN",
                    why="nobody can tell which part the column is",
                    fix="such as --columns prompt=question completion=answer",
                )
        return {part: column for part, _, column in pairs}
