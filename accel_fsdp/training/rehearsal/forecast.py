"""The plan's prediction of the real job, beside the rehearsal of the small one."""

from dataclasses import replace
from typing import Any, get_args

from accel_fsdp.config import JobConfig
from accel_fsdp.errors import UserError
from accel_fsdp.linter import parse_command_line
from accel_fsdp.prediction import from_yaml, name_of, predicted
from accel_fsdp.prediction.memory import OptimizerName, Recipe
from accel_fsdp.prediction.tracing import by_name
from accel_fsdp.training.rehearsal.small_run import sizes_of
from accel_fsdp.units import about_gib, counted


def of_job(job: JobConfig, model: str | None, words: tuple[str, ...]) -> str:
    """A sentence with the peak of one rank of the real job; empty where the planner can't say."""
    if model is None:
        return ""
    recipe = _recipe(parse_command_line(list(words)))
    try:
        layout, recipe = from_yaml.of_config(job, recipe)
        shape, tapes = by_name.read_shape(model, recipe)
        peak = predicted(shape, tapes, recipe, layout, None).peak.total
    except (UserError, RuntimeError, KeyError):
        return ""
    batch = f"{counted(recipe.rows, 'row')} of {recipe.length} tokens"
    ranks = counted(layout.ranks, "rank")
    return f"predicted for the real job: {about_gib(peak)} at the peak of each of {ranks} ({name_of(layout)}, {batch})"


def _recipe(arguments: dict[str, Any]) -> Recipe:
    """What the arguments of `train/sft.py` say; Trainer's defaults where they don't."""
    adapter = "use_peft" in arguments
    optimizer = str(arguments.get("optim", "adamw_torch_fused"))
    sizes = sizes_of(arguments)
    recipe = Recipe(
        method=("qlora" if "load_in_4bit" in arguments else "lora") if adapter else "full",
        dtype="bfloat16" if adapter else "float32",
        rows=sizes["per_device_train_batch_size"],
        length=sizes["max_length"],
        accumulation=sizes["gradient_accumulation_steps"],
        checkpointing="full" if str(arguments.get("gradient_checkpointing", False)).lower() == "true" else "none",
    )
    return replace(recipe, optimizer=optimizer) if optimizer in get_args(OptimizerName) else recipe  # type: ignore[arg-type]
