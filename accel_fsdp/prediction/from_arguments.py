"""From the arguments of `train/sft.py` to what the planner predicts for. Pure."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

from accel_fsdp.prediction.memory import OptimizerName, Recipe

SIZES: Mapping[str, int] = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "max_length": 1024}
"""Arguments about sizes, and the defaults of Trainer and `train/sft.py`."""


def sizes_of(given: Mapping[str, object]) -> dict[str, int]:
    """Rows of a rank's micro-batch, micro-batches of a step, tokens of a row: what is given, else the defaults."""
    found = {name: whole(given.get(name)) for name in SIZES}
    return {name: found[name] or default for name, default in SIZES.items()}


def whole(value: object) -> int:
    """The number of a command line; 0 where there is none above it."""
    return int(text) if (text := str(value)).isdecimal() else 0


def recipe_of(arguments: Mapping[str, Any]) -> Recipe:
    """What the arguments say; Trainer's defaults where they don't."""
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
