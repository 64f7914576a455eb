"""YAML files as people write them: read with their comments and unknown keys, and written back line by line."""

import io
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import yaml

from accel_fsdp.config import yaml_checks
from accel_fsdp.config.job_config import JobConfig, Place
from accel_fsdp.errors import UsageError
from accel_fsdp.units import MIB, gib_or_mib

if TYPE_CHECKING:
    from ruamel.yaml import YAML


STDIN = "-"
"""The name under which a command reads its standard input."""
WITHOUT_WAITING = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
"""The flags by which a pipe without another end doesn't block; 0 on Windows, which has neither."""
LARGEST = MIB
"""Bytes of a YAML; ruamel.yaml needs a minute for ten times as many."""


def dump(document: Any) -> str:
    """The YAML text of a new mapping, quoted where necessary, or of what `load` returned.

    Lines of a loaded document that were not edited come back byte for byte.
    """
    source: str | None = getattr(document, "source", None)
    if source is None:
        return text_of(_quoted(document))
    if document.is_json:
        return json.dumps(document, indent=_json_indent(source)) + "\n" * source.endswith("\n")
    return source


def _quoted(value: Any) -> Any:
    """Quotes text where necessary, at every level: a layer class may be called NO."""
    return {key: _quoted(inner) for key, inner in value.items()} if isinstance(value, dict) else as_scalar(value)


def as_scalar(value: Any) -> Any:
    """Quotes text that PyYAML would read as another type, such as no, on or 1e8; returns other values unchanged."""
    try:
        is_unchanged = not isinstance(value, str) or yaml.safe_load(value) == value
    except yaml.YAMLError:  # an unfinished quote, or a control character, which the emitter escapes by itself
        is_unchanged = not value.isprintable()
    if is_unchanged:
        return value
    from ruamel.yaml.scalarstring import SingleQuotedScalarString

    return SingleQuotedScalarString(value)


def _json_indent(text: str) -> int | None:
    lines = text.strip().splitlines()
    return len(lines[1]) - len(lines[1].lstrip(" ")) if len(lines) > 1 else None


def indent_of(text: str) -> int:
    nested = [len(line) - len(line.lstrip(" ")) for line in text.splitlines() if line.startswith(" ") and ":" in line]
    return nested[0] if nested else 2


def text_of(document: Any, indent: int = 2) -> str:
    stream = io.StringIO()
    round_trip = _round_trip()
    round_trip.indent(mapping=indent)
    round_trip.dump(document, stream)
    return stream.getvalue()


def _round_trip() -> "YAML":
    from ruamel.yaml import YAML

    round_trip = YAML()
    round_trip.preserve_quotes = True
    round_trip.width = 4096
    return round_trip


def read_text(path: Path, why: str, fix: str, usual: str = "") -> str:
    """Reads a file that the user named, or stdin for `-`, with Unix line ends.

    Reading stops at the largest plausible size, because devices may have no end; a pipe without a writer counts as
    empty. `why` and `fix` are those of the error, `usual` is its reason for a file that is too large.
    """
    try:
        data = _read(path)
    except (OSError, ValueError) as error:  # a ValueError is a null in the name
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot read {path}: {reason}", why=why, fix=fix) from error
    if len(data) > LARGEST:
        raise UsageError(f"{path} is larger than {gib_or_mib(LARGEST)}", why=usual or why, fix=fix)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        encoding = "UTF-16" if data.startswith((b"\xff\xfe", b"\xfe\xff")) else "LATIN1"
        raise UsageError(
            f"cannot read {path}: it is not UTF-8 text",
            why="Accelerate and Python read UTF-8",
            fix=f"save it as UTF-8, such as with iconv -f {encoding} -t UTF-8; or {fix}",
        ) from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _read(path: Path) -> bytes:
    """A file's bytes, up to one more than the size limit."""
    if str(path) == STDIN:
        return sys.stdin.buffer.read(LARGEST + 1)
    with open(path, "rb", opener=_without_waiting) as file:
        if WITHOUT_WAITING:
            os.set_blocking(file.fileno(), True)
        return file.read(LARGEST + 1)


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | WITHOUT_WAITING)


def _text(path: Path) -> str:
    """The text of an Accelerate YAML."""
    text = read_text(
        path,
        why="the command works on an Accelerate YAML that exists",
        fix="give the YAML that accelerate launch --config_file takes, or make one: accel-fsdp config -o FILE",
        usual="an Accelerate YAML has a few dozen lines",
    )
    yaml_checks.check_printable(text, path)
    yaml_checks.check_text(text, path)
    return text


def doubled_keys(text: str) -> dict[str, list[Place]]:
    """The keys, as dotted paths, that occur more than once in one mapping of a YAML, each with its places."""
    top = yaml.compose(text)
    places: dict[str, list[Place]] = {}
    if not isinstance(top, yaml.MappingNode):
        return places
    nested = [(f"{key.value}.", value) for key, value in top.value if isinstance(value, yaml.MappingNode)]
    for section, mapping in [("", top), *nested]:
        for key, _ in mapping.value:
            if isinstance(key, yaml.ScalarNode):
                places.setdefault(f"{section}{key.value}", []).append(_place(key.start_mark))
    return {key: of_key for key, of_key in places.items() if len(of_key) > 1}


def _place(mark: Any) -> Place:
    return mark.line + 1, mark.column + 1


def load(path: Path, doubled: bool = False) -> Any:
    """Reads an Accelerate YAML with ruamel.yaml: a mapping whose comments, order and spelling survive a later dump.

    With `doubled` a key may occur twice; such a document must not be dumped.
    """
    from ruamel.yaml.constructor import DuplicateKeyError
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    text = _text(path)
    try:
        round_trip = _round_trip()
        round_trip.allow_duplicate_keys = doubled
        content = round_trip.load(text)
    except DuplicateKeyError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        raise UsageError(
            f"{path}:{line}: {str(error.problem).partition(' with value')[0]}",
            why="Accelerate takes the last one silently, and other readers refuse the file",
            fix="remove all but one",
        ) from error
    except yaml_checks.NO_VALUE as error:
        raise yaml_checks.no_value(text, path, error) from error
    except (YAMLError, RecursionError) as error:
        mark = error.problem_mark if isinstance(error, MarkedYAMLError) else None
        location = ":".join(map(str, (path, *_place(mark)))) if mark else str(path)
        problem = getattr(error, "problem", None) or getattr(error, "reason", "not YAML")
        raise UsageError(
            f"{location}: {problem}",
            why="the file is not valid YAML",
            fix="correct that line, or make a new file: accel-fsdp config",
        ) from error
    if not isinstance(content, dict):
        kind = "a list" if isinstance(content, list) else "a single value"
        raise UsageError(
            f"{path} holds no keys" if content is None else f"{path} is {kind}, not a mapping",
            why="an Accelerate YAML is a mapping such as distributed_type: FSDP",
            fix="make one: accel-fsdp config -o FILE",
        )
    content.source = text  # type: ignore[attr-defined]  # dump gives untouched lines back as they were
    content.is_json = path.suffix == ".json"  # type: ignore[attr-defined]  # how Accelerate chooses its parser
    return content


ReadConfig: TypeAlias = tuple[JobConfig, Any]
"""The configuration, and the ruamel.yaml document for lines and edits."""


def read_config(path: Path, doubled: bool = False) -> ReadConfig:
    """Returns the configuration, and the ruamel.yaml document for lines and edits.

    With `doubled` a key may occur twice: the last one counts, as in Accelerate.
    """
    document = load(path, doubled)
    try:
        values = json.loads(document.source) if document.is_json else yaml_checks.plain_values(document.source, path)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        kind = "not JSON, which Accelerate reads from a file of that name: " if document.is_json else ""
        raise unreadable(path, kind + _problem(error)) from error
    if not isinstance(values, dict):
        raise unreadable(path, "it holds no keys for PyYAML")
    twice = doubled_keys(document.source) if doubled else {}
    return JobConfig(values, document.source, _absent(values, path), twice), document


def _problem(error: Exception) -> str:
    """The first line of a parser's message, with the line of the file if it is known."""
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    return (f"line {mark.line + 1}: " if mark else "") + str(error).splitlines()[0]


def _absent(values: dict[str, Any], path: Path) -> dict[str, str]:
    """Says where DeepSpeed's own file is if it can't be opened from here: beside the YAML, or in a missing folder."""
    section = values.get("deepspeed_config")
    file_name = section.get("deepspeed_config_file") if isinstance(section, dict) else None
    target = Path(os.path.expanduser(file_name)) if isinstance(file_name, str) and file_name else path
    if os.path.exists(target):
        return {}
    if os.path.exists(path.parent / target):
        return {"deepspeed_config_file": "beside"}
    elsewhere = target.is_absolute() and not os.path.exists(target.parent)
    return {"deepspeed_config_file": "elsewhere" if elsewhere else ""}


def unreadable(path: Path, reason: str) -> UsageError:
    return UsageError(f"cannot read {path}: {reason}", why="nothing can be checked", fix="give an Accelerate YAML")
