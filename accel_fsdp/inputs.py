"""Reads what the linter looks at: the YAML, the training script's arguments, the installed versions, the model."""

import importlib.metadata
import json
import shlex
from pathlib import Path
from typing import Any

import yaml

from accel_fsdp import config
from accel_fsdp.check import Subject
from accel_fsdp.errors import UsageError

PACKAGES = ("torch", "accelerate", "transformers", "peft", "trl", "safetensors", "deepspeed")


def read_subject(path: Path, model: str | None, args_file: Path | None) -> tuple[Subject, Any]:
    """Returns what the rules see and the ruamel.yaml document for lines and repairs.

    Raises:
        UserError: a file can't be read, or the model can't.
    """
    document = config.load(path)
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise unreadable(path, str(error).splitlines()[0]) from error
    if not isinstance(values, dict):
        raise unreadable(path, "it holds no keys for PyYAML")
    facts = None
    if model is not None:
        from accel_fsdp.facts import read_model

        facts = read_model(model)
    args = None if args_file is None else read_args(args_file)
    return Subject(values=values, args=args, model=facts, versions=installed_versions()), document


def read_args(path: Path) -> dict[str, Any]:
    """Reads a script's arguments: a YAML or JSON mapping, or a command line with `--name value` words.

    Raises:
        UserError: it can't be read or holds neither.
    """
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except OSError as error:
        raise unreadable(path, str(error.strerror)) from error
    except (yaml.YAMLError, ValueError):
        content = None
    if isinstance(content, dict):
        return {str(key): value for key, value in content.items()}
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    if not any(word.startswith("--") for word in words):
        raise unreadable(path, "neither a mapping nor a command line")
    return parse_command_line(words)


def parse_command_line(words: list[str]) -> dict[str, Any]:
    """`--name value`, `--name=value` and a bare `--name` (true), as HfArgumentParser understands them."""
    args: dict[str, Any] = {}
    for position, word in enumerate(words):
        if not word.startswith("--"):
            continue
        name, equals, value = word.removeprefix("--").partition("=")
        following = words[position + 1] if position + 1 < len(words) else "--"
        args[name.replace("-", "_")] = value if equals else True if following.startswith("--") else following
    return args


def installed_versions() -> dict[str, str]:
    """Versions of the libraries that rules depend on; what is not installed is left out. Imports none of them."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def unreadable(path: Path, reason: str) -> UsageError:
    """The error for a file that nothing can be said about."""
    return UsageError(f"cannot read {path}: {reason}", why="nothing can be checked", fix="give an Accelerate YAML")
