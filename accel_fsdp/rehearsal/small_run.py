"""The arguments of `train/sft.py` for a rehearsal: the user's, except those for sizes, paths and publishing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from accel_fsdp import command_line
from accel_fsdp.config import EXPERT_FIELD
from accel_fsdp.job import from_arguments
from accel_fsdp.rehearsal.rows import Rows
from accel_fsdp.training.data import columns

STEPS, SAVED = 4, 2
"""Steps of the rehearsal, and the step of the first checkpoint."""
ROWS, TOKENS = 2, 64
"""Rows of each rank and step, and tokens of a row, at most."""
SET: Mapping[str, str] = {
    "max_steps": str(STEPS),
    "save_strategy": "steps",
    "async_checkpoints": "false",
    "save_steps": str(SAVED),
    "logging_steps": "1",
    "report_to": "none",
    "disable_tqdm": "true",
    "learning_rate": "0.003",
    "lr_scheduler_type": "linear",
}
"""The values that a rehearsal sets: a rate at which four steps differ, and a log of each step."""
DROPPED = (
    *("num_train_epochs", "dataset_config", "dataset_test_split", "model_revision"),
    *("save_total_limit", "load_best_model_at_end", "early_stopping_patience", "metric_for_best_model"),
    *("eval_strategy", "eval_steps", "eval_on_start", "push_to_hub", "hub_model_id", "hub_strategy", "hub_token"),
    *("resume_from_checkpoint", "warmup_steps", "warmup_ratio", "logging_strategy", "run_name", "dataset_num_proc"),
    *("dataloader_num_workers", "accelerate_config", "profile_steps", "checkpoint_uri", "upload_timeout"),
)
"""Arguments without meaning for few steps of few rows."""
OF_OWN_ROWS = ("columns", "dataset_text_field")
"""Arguments that made-up rows don't need."""
OF_ANSWERS = ("assistant_only_loss", "completion_only_loss", "columns")
"""Arguments that restrict the loss to answers."""
WHOLE = columns.ALIASES["messages"]
"""The columns that are trained as a whole without those arguments."""
OF_GPUS = ("attn_implementation", "use_liger_kernel", "torch_compile", "torch_compile_backend", "tf32")
"""Arguments that need a GPU; a rehearsal runs without them."""
OF_THE_PLACE = ("resume_from_checkpoint", "accelerate_config", "hub_token", EXPERT_FIELD)
"""Arguments that refer to things on the machine of the real job, or to its ranks."""
PLACES = ("model_name_or_path", "dataset_name", "output_dir")
OF_PRECISION = ("bf16", "fp16", "dtype", "export_dtype", "bf16_full_eval", "neftune_noise_alpha", "lora_dropout")
"""Arguments that round, or draw at random."""


@dataclass(frozen=True)
class SmallRun:
    """The arguments of each launch. `left_out`: the user's arguments that a rehearsal doesn't take.

    `keep_end`: rows that are too long are cut at their beginning.
    """

    kept: tuple[str, ...]
    rows: int
    accumulation: int
    max_length: int
    left_out: tuple[str, ...]
    keep_end: bool = False

    def words(self, places: Mapping[str, str], rows: int, **more: str) -> list[str]:
        """The arguments for processes that take this number of rows each."""
        sizes = {
            "per_device_train_batch_size": str(rows),
            "gradient_accumulation_steps": str(self.accumulation),
            "max_length": str(self.max_length),
        }
        if self.keep_end:
            sizes["truncation_mode"] = "keep_end"
        pairs = {**SET, **sizes, **places, **more}
        return [*self.kept, *(word for name, value in pairs.items() for word in (f"--{name}", value))]

    @property
    def adapter(self) -> bool:
        return "--use_peft" in self.kept

    @property
    def saves_in_background(self) -> bool:
        """Only the resumed run does: one process has no shards, and the killed run ends at its first checkpoint."""
        return "--async_checkpoints" in self.kept

    @property
    def quantized(self) -> bool:
        """Whether the base has 4-bit weights, which are packed in the dtype of the computation."""
        return "--load_in_4bit" in self.kept

    def exact(self, words: Sequence[str]) -> list[str]:
        """The words for a run in float32 without dropout, so that losses can be compared."""
        plain, _ = command_line.without_flags(words, set(OF_PRECISION) - ({"dtype"} if self.quantized else set()))
        extra = ["--export_dtype", "float32", *([] if self.quantized else ["--dtype", "float32"])]
        return [*plain, *extra, *(["--lora_dropout", "0"] if self.adapter else [])]


def readable(words: Sequence[str]) -> tuple[str, ...]:
    """The real job's arguments, without those that `train/sft.py` can't parse on this machine."""
    return command_line.without_flags(words, {*PLACES, *OF_GPUS, *OF_THE_PLACE})[0]


def replaced(words: Sequence[str]) -> list[str]:
    """The user's flags that a rehearsal leaves out or sets itself, besides paths and sizes."""
    return sorted(f"--{name}" for name in set(command_line.parse_command_line(words)) & {*SET, *DROPPED})


def small_run(words: Sequence[str], rows: Rows) -> SmallRun:
    """The user's arguments, changed for a small run on these rows.

    Where only answers are trained, the first tokens of a real row may hold none of them.
    """
    arguments = command_line.parse_command_line(words)
    sizes = from_arguments.sizes_of(arguments)
    is_cut = rows.origin == "cut"
    whole_rows = bool(rows.columns & {*WHOLE, str(arguments.get("dataset_text_field", "text"))})
    has_completions = (
        not whole_rows or arguments.get("truncation_mode") == "drop" or any(name in arguments for name in OF_ANSWERS)
    )
    replaced = {*SET, *sizes, *PLACES, EXPERT_FIELD}
    replaced |= {"truncation_mode"} if is_cut and has_completions else set()
    remaining, dropped = command_line.without_flags(
        words, {*replaced, *DROPPED, *OF_GPUS, *(() if is_cut else OF_OWN_ROWS)}
    )
    return SmallRun(
        remaining,
        rows=min(sizes["per_device_train_batch_size"], ROWS),
        accumulation=min(sizes["gradient_accumulation_steps"], 2),
        max_length=min(sizes["max_length"], TOKENS),
        left_out=tuple(sorted({name for name in dropped if name in OF_GPUS})),
        keep_end=is_cut and has_completions,
    )
