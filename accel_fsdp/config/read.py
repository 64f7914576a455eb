"""Reads an Accelerate YAML twice: for the values that Accelerate gets, and for its lines and comments."""

import json
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from accel_fsdp.config import yaml_file
from accel_fsdp.config.job_config import JobConfig
from accel_fsdp.errors import UsageError

LONGEST_PATH = 4096
MOST_VALUES = 10_000
"""The most values in one YAML with all aliases expanded: Accelerate and messages turn values into text."""


ReadConfig: TypeAlias = tuple[JobConfig, Any]
"""The configuration, and the ruamel.yaml document for lines and edits."""


def read_config(path: Path, doubled: bool = False) -> ReadConfig:
    """Returns the configuration, and the ruamel.yaml document for lines and edits.

    With `doubled` a key may occur twice: the last one counts, as in Accelerate.
    """
    document = yaml_file.load(path, doubled)
    try:
        values = json.loads(document.source) if document.is_json else yaml.safe_load(document.source)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        kind = "not JSON, which Accelerate reads from a file of that name: " if document.is_json else ""
        raise unreadable(path, kind + str(error).splitlines()[0]) from error
    if not isinstance(values, dict):
        raise unreadable(path, "it holds no keys for PyYAML")
    if _expanded(values, frozenset()) > MOST_VALUES:
        raise unreadable(path, "written out, its aliases make more values than any config has")
    twice = yaml_file.doubled_keys(document.source) if doubled else {}
    return JobConfig(values, document.source, _absent(values, path), twice), document


def _expanded(value: Any, above: frozenset[int], sizes: dict[int, int] | None = None) -> int:
    """The number of values once each alias is expanded; infinite where one holds itself."""
    sizes = {} if sizes is None else sizes
    if id(value) in above:
        return MOST_VALUES + 1
    if not isinstance(value, dict | list | tuple | set):
        return 1
    if id(value) not in sizes:
        inner = value.values() if isinstance(value, dict) else value
        sizes[id(value)] = 1 + sum(_expanded(item, above | {id(value)}, sizes) for item in inner)
    return sizes[id(value)]


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
