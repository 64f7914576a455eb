"""The folders of DeepSpeed's checkpoints, by the names of their files; no torch."""

import re
from pathlib import Path

from accel_fsdp import untrusted_files
from accel_fsdp.checkpoints import file_names
from accel_fsdp.errors import UserError


def folder_of(checkpoint: Path) -> Path | None:
    """The folder of the ranks' files: the one that `latest` names, else the highest `global_stepN`; None without one.

    `Accelerator.save_state` names it `pytorch_model`, Trainer `global_stepN`.
    """
    if any(checkpoint.glob(file_names.ZERO_OPTIMIZERS)):
        return checkpoint
    name = latest(checkpoint)
    if name and Path(name).name == name and any((checkpoint / name).glob(file_names.ZERO_OPTIMIZERS)):
        return checkpoint / name
    steps = list(checkpoint.glob(f"{file_names.GLOBAL_STEP}*"))  # verl names its own so
    whole = [path for path in steps if any(path.glob(file_names.ZERO_OPTIMIZERS))]
    parts = [path for path in steps if any(path.glob(file_names.ZERO_MODELS))]
    return max(whole or parts, key=lambda path: numbers(path.name), default=None)


def is_inner(folder: Path) -> bool:
    """Whether a folder of the ranks' files is inside of a checkpoint."""
    return folder.name.startswith(file_names.GLOBAL_STEP) or latest(folder.parent) == folder.name


def latest(checkpoint: Path) -> str | None:
    """The folder that DeepSpeed's file `latest` names; None without such a file: `latest` may link to a checkpoint."""
    path = checkpoint / file_names.LATEST
    content = None if path.is_dir() else untrusted_files.read_bytes(path)
    return None if content is None else content.decode(errors="replace").strip()


def numbers(name: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", name)]


def scaled(folder: Path) -> UserError:
    """The error for a checkpoint of fp16 that is to become one of another engine."""
    return UserError(
        f"{folder} is of fp16",
        why="engines scale its loss in different ways, and the scale would be lost",
        fix="resume it under its own engine, or train in bf16",
    )
