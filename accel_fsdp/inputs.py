"""Reads what the linter looks at: YAML, arguments, versions; and if asked model, checkpoint, script, this machine."""

import ast
import importlib.metadata
import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from accel_fsdp import config
from accel_fsdp.check import Subject
from accel_fsdp.errors import UsageError
from accel_fsdp.types import HereFacts, ScriptFacts

PACKAGES = ("torch", "accelerate", "transformers", "peft", "trl", "safetensors", "deepspeed")


PORT = 29500
"""Where the launcher meets unless the file says otherwise."""


@dataclass(frozen=True)
class Sources:
    """What there is to read besides the YAML; what isn't given isn't looked at, this machine neither."""

    model: str | None = None
    args: Path | None = None
    checkpoint: Path | None = None
    script: Path | None = None
    here: bool = False


def read_subject(path: Path, sources: Sources | None = None) -> tuple[Subject, Any]:
    """Returns what the rules see and the ruamel.yaml document for lines and repairs.

    Raises:
        UserError: a file can't be read, or the model can't.
    """
    sources = sources or Sources()
    document = config.load(path)
    try:
        values = yaml.safe_load(document.source)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise unreadable(path, str(error).splitlines()[0]) from error
    if not isinstance(values, dict):
        raise unreadable(path, "it holds no keys for PyYAML")
    facts = checkpoint = None
    if sources.model is not None:
        from accel_fsdp.facts import read_model

        facts = read_model(sources.model)
    if sources.checkpoint is not None:
        from accel_fsdp.weights import read_checkpoint

        checkpoint = read_checkpoint(sources.checkpoint)
    args = None if sources.args is None else read_args(sources.args)
    subject = Subject(
        values=values,
        args=args,
        model=facts,
        versions=installed_versions(),
        starter="" if sources.args is None else read_starter(sources.args),
        checkpoint=checkpoint,
        script=None if sources.script is None else read_script(sources.script),
        here=_read_here(values, args or {}) if sources.here else None,
    )
    return subject, document


def _read_here(values: dict[str, Any], args: dict[str, Any]) -> HereFacts:
    from accel_fsdp.here import read_here

    port = values.get("main_process_port", PORT)
    output = args.get("output_dir")
    return read_here(port if isinstance(port, int) else PORT, None if output is None else str(output))


def read_script(path: Path) -> ScriptFacts:
    """Parses a training script without running it.

    Raises:
        UsageError: it can't be read, or isn't Python.
    """
    try:
        return ScriptFacts(path.name, ast.parse(path.read_text(encoding="utf-8")))
    except (OSError, SyntaxError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or getattr(error, "msg", None) or error
        raise UsageError(
            f"cannot read {path}: {reason}", why="the script can't be checked", fix="give a Python file"
        ) from error


def read_starter(path: Path) -> str:
    """The word that a command line in an arguments file begins with: accelerate, torchrun, python; else empty.

    `python -m accelerate...` counts as accelerate and `python -m torch...` as torchrun.
    """
    try:
        words = shlex.split(path.read_text(encoding="utf-8").replace("\\\n", " "), comments=True)
    except ValueError:
        return ""
    words = [word for word in words if "=" not in word or word.startswith("-")]  # drop VARIABLE=value before it
    first = words[0].rpartition("/")[2] if words else ""
    module = words[2] if len(words) > 2 and words[1] == "-m" else ""
    if first.startswith("python") and module.startswith(("accelerate", "torch.distributed")):
        return "accelerate" if module.startswith("accelerate") else "torchrun"
    return first if first in ("accelerate", "torchrun", "python", "python3") else ""


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
