"""The table between a recipe and the arguments of `train/sft.py`, and the schedule of the arguments. Pure."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, Literal

from accel_fsdp.config import DTYPES, EXPERT_FIELD, LONG_DTYPES, TORCH_DTYPES, Method, Precision
from accel_fsdp.errors import UsageError
from accel_fsdp.job.job import (
    ATTENTION_LINEAR,
    Attention,
    Checkpointing,
    Job,
    Recipe,
)
from accel_fsdp.models import optimizers

SIZES: Mapping[str, int] = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "max_length": 1024}
"""The size arguments, with the defaults of Trainer and `train/sft.py`."""
WHOLE: Mapping[str, int] = {
    **dict.fromkeys((*SIZES, "per_device_eval_batch_size", "lora_r", EXPERT_FIELD), 1),
    "save_total_limit": 0,
    "max_steps": -1,
}
"""Integer arguments and their minimum."""
DECISIVE = (
    *("model_name_or_path", "dataset_name", "use_peft", "lora_alpha", "lora_dropout", "dtype", "optim"),
    *("learning_rate", "num_train_epochs", "gradient_checkpointing", "packing", "use_liger_kernel", "eval_strategy"),
)
"""Other arguments that decide a job."""
SLIP = 0.88
"""The similarity of two names that differ by a letter or two that are exchanged."""
LORA_DROPOUT, EVAL_BATCH = 0.05, 8
"""Other defaults of `train/sft.py` and Trainer."""


def sizes_of(arguments: Mapping[str, object]) -> dict[str, int]:
    """Rows of a rank's micro-batch, micro-batches of a step, tokens of a row; defaults for missing ones."""
    return {name: positive_int(arguments.get(name)) or default for name, default in SIZES.items()}


def refuse_unreadable(arguments: Mapping[str, Any]) -> None:
    """Checks the arguments that a prediction reads.

    Raises:
        UsageError: a value is invalid, or a name is a misspelling of an argument.
    """
    for name, minimum in WHOLE.items():
        value = arguments.get(name)
        if value is not None and (not re.fullmatch(r"-?\d+", str(value)) or int(value) < minimum):
            raise UsageError(
                f"{name}: {value} in the arguments",
                why=f"it must be a whole number, {minimum} or more",
                fix=f"--{name} {max(minimum, 1)}",
            )
    for name, near in misspelt(arguments):
        raise UsageError(
            f"{name} is unknown. Did you mean {near}?",
            why="the prediction would use the default",
            fix=f"--{near} in the arguments; accel-fsdp check FILE --args FILE looks at all of them",
        )


def misspelt(arguments: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The names that are nearly those of arguments that decide a job, with those."""
    known = (*WHOLE, *DECISIVE)
    for name in sorted(arguments.keys() - {*known}):
        for near in get_close_matches(name, known, 1, SLIP):
            yield name, near


def positive_int(value: object) -> int:
    """The value as a positive integer; 0 if it isn't one."""
    return int(text) if (text := str(value)).isdecimal() else 0


def expert_parallel_size(arguments: Mapping[str, Any]) -> int:
    """The expert-parallel size in the arguments of `train/sft.py`; 1 without a valid number."""
    return positive_int(arguments.get(EXPERT_FIELD)) or 1


def recipe_of(arguments: Mapping[str, Any]) -> Recipe:
    """The recipe of the arguments, with the defaults of `train/sft.py`."""
    return Recipe(**{row.field: row.read(arguments) for row in ROWS})


def planned_recipe(method: Method, precision: Precision) -> Recipe:
    """The script's recipe of a method, with the plan's default length and one row."""
    usual = recipe_of(_method_arguments(Recipe(method)))
    return replace(usual, precision=precision, rows=1, length=Recipe.length)


def arguments_of(job: Job, sized: bool = True) -> dict[str, Any]:
    """The arguments with which `train/sft.py` trains a job: its sizes, unless it isn't `sized`, and what differs from
    the script's defaults.

    The YAML has the precision, the offload of inputs, and activation checkpointing where the engine does it. An adapter
    gets `LORA_RATE`.
    """
    recipe = replace(job.recipe, checkpointing="none") if job.recompute == "engine" else job.recipe
    usual = recipe_of(_method_arguments(recipe))
    arguments = {EXPERT_FIELD: job.layout.experts} if job.layout.experts > 1 else {}
    for row in ROWS:
        value = getattr(recipe, row.field)
        by_checkpoint = row.field == "dtype" and job.adapter  # by default it is that of the base's checkpoint
        if row.field in WRITTEN:
            arguments |= row.write(recipe) if sized else {}
        elif by_checkpoint or row.field == "method" or value != getattr(usual, row.field):
            arguments |= row.write(recipe)
    return arguments | ({"learning_rate": LORA_RATE} if job.adapter else {})


def argument_words(job: Job, sized: bool = True) -> list[str]:
    """The arguments of a job as words of a command line."""
    items = arguments_of(job, sized).items()
    return [word for name, value in items for word in (f"--{name}", _word_of(value))]


def _word_of(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _method(arguments: Mapping[str, Any]) -> Method:
    return "qlora" if is_on(arguments.get("load_in_4bit")) else "lora" if is_on(arguments.get("use_peft")) else "full"


def _method_arguments(recipe: Recipe) -> dict[str, Any]:
    if recipe.method == "full":
        return {}
    storage = {"load_in_4bit": True, "bnb_4bit_quant_storage": TORCH_DTYPES[recipe.precision]}
    return {"use_peft": True, **(storage if recipe.method == "qlora" else {})}


def _dtype(arguments: Mapping[str, Any]) -> str:
    name = str(arguments.get("dtype", arguments.get("torch_dtype", "auto"))).removeprefix("torch.")
    dtype = LONG_DTYPES.get(name, name)
    return dtype if dtype in DTYPES else "float32" if _method(arguments) == "full" else "bfloat16"


def _size(name: str) -> Callable[[Mapping[str, Any]], int]:
    return lambda arguments: positive_int(arguments.get(name)) or SIZES[name]


def _of_adapter(field: str, read: Callable[[Mapping[str, Any]], Any]) -> Callable[[Mapping[str, Any]], Any]:
    """Reads a field of an adapter; without one it keeps the default of `Recipe`, and decides nothing."""
    return lambda arguments: getattr(Recipe, field) if _method(arguments) == "full" else read(arguments)


def _eval_batch(arguments: Mapping[str, Any]) -> int:
    """One rank's rows in an evaluation; 0 without evaluation."""
    if _word(arguments, "eval_strategy", "no") in ("no", "none"):
        return 0
    return positive_int(arguments.get("per_device_eval_batch_size")) or EVAL_BATCH


def _eval_arguments(recipe: Recipe) -> dict[str, Any]:
    if not recipe.eval_batch:
        return {"eval_strategy": "no"}
    return {"eval_strategy": "steps", "per_device_eval_batch_size": recipe.eval_batch}


def _checkpointing(arguments: Mapping[str, Any]) -> Checkpointing:
    if not is_on(arguments.get("gradient_checkpointing")):
        return "none"
    options = arguments.get("gradient_checkpointing_kwargs") or {}
    if isinstance(options, str):
        try:
            options = json.loads(options)
        except ValueError:
            options = {}
    return "reentrant" if isinstance(options, Mapping) and is_on(options.get("use_reentrant")) else "full"


def _checkpointing_arguments(recipe: Recipe) -> dict[str, Any]:
    older = {"gradient_checkpointing_kwargs": '{"use_reentrant": true}'} if recipe.checkpointing == "reentrant" else {}
    return {"gradient_checkpointing": recipe.recomputes, **older}


@dataclass(frozen=True)
class Row:
    """A field of `Recipe` and the arguments of `train/sft.py` that decide it.

    `read` returns the field's value, without an argument the script's default; `write` returns the arguments that give
    a recipe's value.
    """

    field: str
    read: Callable[[Mapping[str, Any]], Any]
    write: Callable[[Recipe], Mapping[str, Any]]


def _row(field: str, name: str, read: Callable[[Mapping[str, Any]], Any]) -> Row:
    """A row whose argument takes the field's value as it is."""
    return Row(field, read, lambda recipe: {name: getattr(recipe, field)})


ROWS: tuple[Row, ...] = (
    _row("rows", "per_device_train_batch_size", _size("per_device_train_batch_size")),
    _row("accumulation", "gradient_accumulation_steps", _size("gradient_accumulation_steps")),
    _row("length", "max_length", _size("max_length")),
    Row("checkpointing", _checkpointing, _checkpointing_arguments),
    Row("method", _method, _method_arguments),
    _row(
        "lora_rank",
        "lora_r",
        _of_adapter("lora_rank", lambda arguments: positive_int(arguments.get("lora_r")) or Recipe.lora_rank),
    ),
    Row(
        "lora_targets",
        _of_adapter("lora_targets", lambda arguments: targets_of(names_in(arguments.get("lora_target_modules")))),
        lambda recipe: {"lora_target_modules": " ".join(sorted(ATTENTION_LINEAR))},
    ),
    Row(
        "lora_dropout",
        _of_adapter("lora_dropout", lambda arguments: (number(arguments.get("lora_dropout"), LORA_DROPOUT) or 0) > 0),
        lambda recipe: {"lora_dropout": LORA_DROPOUT if recipe.lora_dropout else 0},
    ),
    Row("precision", lambda arguments: precision_of(arguments) or Recipe.precision, lambda recipe: {}),
    _row("dtype", "dtype", _dtype),
    Row(
        "optimizer",
        lambda arguments: optimizers.BY_TRAINERS_NAME.get(str(arguments.get("optim")), Recipe.optimizer),
        lambda recipe: {"optim": recipe.optimizer},
    ),
    _row("liger", "use_liger_kernel", lambda arguments: is_on(arguments.get("use_liger_kernel"))),
    _row("packed", "packing", lambda arguments: is_on(arguments.get("packing"))),
    Row(
        "attention",
        lambda arguments: attention_of(str(arguments.get("attn_implementation", ""))),
        lambda recipe: {"attn_implementation": {"flash": "flash_attention_2"}.get(recipe.attention, recipe.attention)},
    ),
    Row("eval_batch", _eval_batch, _eval_arguments),
    Row("offloads_inputs", lambda arguments: False, lambda recipe: {}),
)
"""Every field of `Recipe`; a field without a row could be planned and not trained."""
WRITTEN = frozenset({"rows", "accumulation", "length"})
"""The fields whose arguments a launch line always has, because people edit them."""
LORA_RATE = 2e-4
"""The learning rate of an adapter: 2e-4 in QLoRA's own runs up to 13B parameters (Dettmers et al. 2023, table 9),
about ten times that of full training (TRL's LoRA guide); Trainer's default, 5e-5, is for full training."""


def precision_of(arguments: Mapping[str, Any]) -> Precision | None:
    """The mixed precision that the arguments ask for; None if they leave it to the YAML."""
    words: tuple[Precision, ...] = ("bf16", "fp16")
    return next((word for word in words if is_on(arguments.get(word))), None)


def names_in(value: Any) -> list[str]:
    """The names in an argument that is a list, or a text with commas or spaces."""
    parts = value if isinstance(value, list | tuple) else str(value or "").strip("[]").replace(",", " ").split()
    return [str(part).strip("'\"") for part in parts]


def targets_of(names: Any) -> Literal["all", "attention"]:
    """The planner's name for an adapter's target modules."""
    modules = set(names or ())
    return "attention" if modules and modules <= ATTENTION_LINEAR else "all"


def attention_of(implementation: str) -> Attention:
    """The planner's name for an attention implementation; unknown ones need about as much memory as sdpa."""
    return "eager" if implementation == "eager" else "flash" if implementation.startswith("flash") else "sdpa"


def notes(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Sentences about arguments that are predicted only approximately."""
    optimizer = str(arguments.get("optim", Recipe.optimizer))
    if optimizer not in optimizers.BY_TRAINERS_NAME:
        yield f"The arguments' {optimizer} is predicted as {Recipe.optimizer}."
    if is_on(arguments.get("auto_find_batch_size")):
        yield "auto_find_batch_size halves the micro-batch where it doesn't fit; the prediction keeps it."


def _word(arguments: Mapping[str, Any], name: str, default: str) -> str:
    """A strategy as Trainer spells it: YAML 1.1 parses no as false."""
    value = arguments.get(name, default)
    return "no" if value is False else str(value).lower()


def number(value: object, default: float | None) -> float | None:
    """The value as a number; `default` if it isn't one."""
    try:
        return float(str(value))
    except ValueError:
        return default


def is_on(value: object) -> bool:
    """Whether a switch of a command line or of a mapping is on."""
    return str(value).lower() in ("true", "1", "yes")
