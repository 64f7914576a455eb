"""The arguments of `train/sft.py` for a rehearsal: the user's own, but for those about sizes, places and publishing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from accel_fsdp.linter import parse_command_line

STEPS, SAVED = 4, 2
"""Steps of the rehearsal, and the one after which the first checkpoint lies."""
ROWS, TOKENS = 2, 64
"""Rows of each rank and step, and tokens of a row, at most."""
SET: Mapping[str, str] = {
    "max_steps": str(STEPS),
    "save_strategy": "steps",
    "save_steps": str(SAVED),
    "logging_steps": "1",
    "report_to": "none",
    "disable_tqdm": "true",
    "learning_rate": "0.003",
    "lr_scheduler_type": "linear",
}
"""What a rehearsal decides: a rate at which four steps differ, and each step logged."""
SIZES: Mapping[str, int] = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "max_length": 1024}
"""Arguments about sizes, and the defaults of Trainer and `train/sft.py`."""
DROPPED = (
    *("num_train_epochs", "dataset_config", "dataset_train_split", "dataset_test_split", "model_revision"),
    *("save_total_limit", "load_best_model_at_end", "early_stopping_patience", "metric_for_best_model"),
    *("eval_strategy", "eval_steps", "eval_on_start", "push_to_hub", "hub_model_id", "hub_strategy", "hub_token"),
    *("resume_from_checkpoint", "warmup_steps", "warmup_ratio", "logging_strategy", "run_name", "dataset_num_proc"),
    *("dataloader_num_workers", "accelerate_config", "columns", "prompt_template", "completion_template"),
)
"""What has no meaning for few steps of made-up rows."""
OF_GPUS = ("attn_implementation", "use_liger_kernel", "torch_compile", "torch_compile_backend", "tf32")
"""What only GPUs have; a rehearsal runs without."""


OF_PRECISION = ("bf16", "fp16", "dtype", "export_dtype", "bf16_full_eval", "neftune_noise_alpha", "lora_dropout")
"""What rounds or draws at random."""


@dataclass(frozen=True)
class SmallRun:
    """Arguments for each launch. `left_out`: those of the user that a rehearsal doesn't take."""

    kept: tuple[str, ...]
    rows: int
    accumulation: int
    max_length: int
    left_out: tuple[str, ...]

    def words(self, places: Mapping[str, str], ranks: int, of_ranks: int, **more: str) -> list[str]:
        """For `ranks` processes, which together take the rows of `of_ranks`."""
        sizes = {
            "per_device_train_batch_size": str(self.rows * of_ranks // ranks),
            "gradient_accumulation_steps": str(self.accumulation),
            "max_length": str(self.max_length),
        }
        pairs = {**SET, **sizes, **places, **more}
        return [*self.kept, *(word for name, value in pairs.items() for word in (f"--{name}", value))]

    @property
    def adapter(self) -> bool:
        """Whether only an adapter is trained."""
        return "--use_peft" in self.kept

    @property
    def quantized(self) -> bool:
        """Whether the base is of 4-bit weights, which are packed in the dtype that is computed with."""
        return "--load_in_4bit" in self.kept

    def exact(self, words: Sequence[str]) -> list[str]:
        """The words for a run in float32 without dropout, whose losses can be compared."""
        plain, _ = _without(words, set(OF_PRECISION) - ({"dtype"} if self.quantized else set()))
        more = ["--export_dtype", "float32", *([] if self.quantized else ["--dtype", "float32"])]
        return [*plain, *more, *(["--lora_dropout", "0"] if self.adapter else [])]


def small_run(words: Sequence[str]) -> SmallRun:
    """What becomes of the user's arguments."""
    given = parse_command_line(list(words))
    sizes = sizes_of(given)
    ours = {*SET, *sizes, "model_name_or_path", "dataset_name", "output_dir"}
    kept, left = _without(words, {*ours, *DROPPED, *OF_GPUS})
    return SmallRun(
        kept,
        rows=min(sizes["per_device_train_batch_size"], ROWS),
        accumulation=min(sizes["gradient_accumulation_steps"], 2),
        max_length=min(sizes["max_length"], TOKENS),
        left_out=tuple(sorted({name for name in left if name in OF_GPUS})),
    )


def sizes_of(given: Mapping[str, object]) -> dict[str, int]:
    """Rows of a rank's micro-batch, micro-batches of a step, tokens of a row: what is given, else the defaults."""
    texts = {name: str(given.get(name)) for name in SIZES}
    return {name: int(texts[name]) if texts[name].isdecimal() and int(texts[name]) else SIZES[name] for name in SIZES}


def _without(words: Sequence[str], names: set[str]) -> tuple[tuple[str, ...], list[str]]:
    """The words without these flags and their values, and the names of those that were there."""
    kept, left, skipping = [], [], False
    for word in words:
        if word.startswith("--"):
            name = word.removeprefix("--").partition("=")[0].replace("-", "_")
            skipping = name in names
            left += [name] if skipping else []
        if not skipping:
            kept.append(word)
    return tuple(kept), left
