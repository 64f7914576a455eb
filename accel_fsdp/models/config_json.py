"""A model's config.json: reads it from a folder, and reports what transformers says about a bad one."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accel_fsdp import untrusted_files
from accel_fsdp.checkpoints import file_names
from accel_fsdp.errors import LIBRARIES, UserError

ANYWHERE = Path(os.path.abspath(os.sep))
"""Reading a model copies nothing, so its user may have put links to another disk into its folder."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Config keys for the experts of a layer."""
DEQUANTISED = frozenset({"mxfp4", "fp_quant"})
"""Quantisations that full training supports: weights are converted to 16 bits on loading, or masters are kept."""


def settings_in(folder: Path) -> dict[str, Any]:
    """Reads the config of a model folder."""
    settings = untrusted_files.read_json(folder / file_names.CONFIG, within=ANYWHERE)
    if not settings:
        raise UserError(
            f"model folder {folder} has no {file_names.CONFIG}",
            why="the architecture can't be known without it",
            fix="give the folder that save_pretrained wrote, or a hub id",
        )
    return settings


@contextmanager
def explained_errors(name: str, passing: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Converts all errors that transformers raises for a config into one message.

    `passing` are errors with other reasons, which the caller handles.

    Raises:
        UserError: any other error was raised, except for a library that isn't installed.
    """
    try:
        yield
    except passing:
        raise
    except (UserError, MemoryError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise _bad_config(name, "it needs more memory than there is") from error
    except ImportError as error:
        if error.name in LIBRARIES:
            raise
        raise UserError(
            f"the class of {name} needs a package that is not installed: {_message_of(error)}",
            why="the layer classes and sizes come from the built model",
            fix="install that package, and run the same command again",
        ) from error
    except Exception as error:
        raise _bad_config(name, _message_of(error)) from error


def _bad_config(name: str, what: str) -> UserError:
    return UserError(
        f"transformers can't use the config of {name}: {what}",
        why="the layer classes and sizes come from it",
        fix="copy its config.json again from where the model comes from, or correct that value",
    )


def _message_of(error: Exception) -> str:
    """The message of a transformers error; for a failed validation that is the second line."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    if not lines or len(lines[0].split()) == 1:  # a KeyError, whose text is the key
        return f"{type(error).__name__} {' '.join(lines)}".strip()
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def quant_method(settings: Any) -> str:
    """The quantisation of a model with this `quantization_config`, if the weights stay quantised; empty otherwise.

    "unknown" if the config doesn't name it.
    """
    config = settings.to_dict() if hasattr(settings, "to_dict") else settings
    if not isinstance(config, Mapping):
        return ""
    if config.get("load_in_4bit") or config.get("load_in_8bit"):
        return "bitsandbytes"
    method = str(getattr(config.get("quant_method"), "value", config.get("quant_method")) or "unknown")
    online = method == "bitnet" and config.get("quantization_mode") == "online"
    return "" if config.get("dequantize") is True or method in DEQUANTISED or online else method
