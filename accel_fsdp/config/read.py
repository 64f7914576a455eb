"""Reads an Accelerate YAML twice: for the values that Accelerate gets, and for its lines and comments."""

import json
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from accel_fsdp.config import yaml_checks, yaml_file
from accel_fsdp.config.job_config import JobConfig
from accel_fsdp.errors import UsageError

LONGEST_PATH = 4096

ReadConfig: TypeAlias = tuple[JobConfig, Any]
"""The configuration, and the ruamel.yaml document for lines and edits."""


def read_config(path: Path, doubled: bool = False) -> ReadConfig:
    """Returns the configuration, and the ruamel.yaml document for lines and edits.

    With `doubled` a key may occur twice: the last one counts, as in Accelerate.
    """
    document = yaml_file.load(path, doubled)
    try:
        values = json.loads(document.source) if document.is_json else yaml_checks.plain_values(document.source, path)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        kind = "not JSON, which Accelerate reads from a file of that name: " if document.is_json else ""
        raise unreadable(path, kind + _problem(error)) from error
    if not isinstance(values, dict):
        raise unreadable(path, "it holds no keys for PyYAML")
    doubled_keys = yaml_file.doubled_keys(document.source) if doubled else {}
    return JobConfig(values, document.source, _absent(values, path), doubled_keys), document


def _problem(error: Exception) -> str:
    """The first line of a parser's message, with the line of the file if it is known."""
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    return (f"line {mark.line + 1}: " if mark else "") + str(error).splitlines()[0]


def _absent(values: dict[str, Any], path: Path) -> dict[str, str]:
    """Says where DeepSpeed's own file is if it can't be opened from here: beside the YAML, or in a missing folder."""
    section = values.get("deepspeed_config")
    file_name = section.get("deepspeed_config_file") if isinstance(section, dict) else None
    if not isinstance(file_name, str) or not file_name or "\0" in file_name or len(file_name) > LONGEST_PATH:
        return {}
    target = Path(file_name).expanduser()
    if target.exists():
        return {}
    if (path.parent / target).exists():
        return {"deepspeed_config_file": "beside"}
    elsewhere = target.is_absolute() and not target.parent.exists()
    return {"deepspeed_config_file": "elsewhere" if elsewhere else ""}


def unreadable(path: Path, reason: str) -> UsageError:
    return UsageError(f"cannot read {path}: {reason}", why="nothing can be checked", fix="give an Accelerate YAML")
