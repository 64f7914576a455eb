"""Refuses YAML texts that a parser can't take, or takes minutes for, and says in which line.

    yaml_checks.check_text(text, path)  # before any parser
    values = yaml_checks.plain_values(text, path)

All YAML files of users pass here before PyYAML or ruamel.yaml makes values of them.
"""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from accel_fsdp.errors import UsageError

MOST_NODES, DEEPEST, LONGEST_NUMBER = 20_000, 100, 1_000
"""Limits of a YAML: keys and values with all aliases expanded, levels, and characters of a number."""
KINDS = {"timestamp": "date", "int": "number", "float": "number", "bool": "boolean"}
NO_VALUE = (ValueError, TypeError, IndexError, KeyError, AttributeError)
"""The errors of both parsers for a text that is not of its type, such as an impossible date: they name no line."""


def check_text(text: str, path: Path) -> None:
    """Refuses aliases that multiply a few bytes to more than a machine can hold, deep nesting, and endless numbers."""
    _check_numbers(text, path)
    count, sizes, incomplete = 0, dict[str, int | None](), list[tuple[str, int]]()  # None: not complete
    with contextlib.suppress(yaml.YAMLError):  # the parser reports it
        for event in yaml.parse(text):
            line = event.start_mark.line + 1 if event.start_mark else 1
            anchor = getattr(event, "anchor", None) or ""
            if isinstance(event, yaml.CollectionStartEvent):
                incomplete.append((anchor, count))
                sizes[anchor], count = None, count + 1
            elif isinstance(event, yaml.CollectionEndEvent):
                anchor, before = incomplete.pop()
                sizes[anchor] = count - before
            elif isinstance(event, yaml.ScalarEvent):
                sizes[anchor], count = 1, count + 1
            elif isinstance(event, yaml.AliasEvent):
                if (size := sizes.get(anchor, 1)) is None:
                    raise _refusal(f"{path}:{line}: *{anchor} holds itself")
                count += size
            if count > MOST_NODES or len(incomplete) > DEEPEST:
                limits = f"{MOST_NODES:,} keys and values with aliases expanded, or {DEEPEST} levels"
                raise _refusal(f"{path}:{line}: more than {limits}, up to here")


def _check_numbers(text: str, path: Path) -> None:
    if match := re.search(rf"(?<![\w:.])\d[\da-fx:_.]{{{LONGEST_NUMBER},}}", text, re.IGNORECASE):
        line = text.count("\n", 0, match.start()) + 1
        raise _refusal(f"{path}:{line}: a number of more than {LONGEST_NUMBER:,} characters")


def _refusal(what: str) -> UsageError:
    why = "no settings are such, and a parser takes minutes for them"
    return UsageError(what, why=why, fix="correct that line, without aliases")


def check_printable(text: str, path: Path) -> None:
    if match := yaml.reader.Reader.NON_PRINTABLE.search(text):
        line = text.count("\n", 0, match.start()) + 1
        raise UsageError(
            f"{path}:{line}: the character U+{ord(match[0]):04X} is not allowed in YAML",
            why="every parser refuses the file",
            fix="remove it; if there are many, save the file as UTF-8 text",
        )


def plain_values(text: str, path: Path) -> Any:
    """The values of a YAML as PyYAML, and so Accelerate, reads them.

    Raises:
        UsageError: a value is not of its type. yaml.YAMLError: it isn't YAML.
    """
    try:
        return yaml.safe_load(text)
    except NO_VALUE as error:
        raise no_value(text, path, error) from error


def no_value(text: str, path: Path, error: Exception) -> UsageError:
    """The error for the first value that is not of its type, such as an impossible date, with its line."""
    for node in _scalars(yaml.compose(text)):
        try:
            yaml.SafeLoader("").construct_object(node)
        except NO_VALUE:
            kind = KINDS.get(node.tag.rpartition(":")[2], "value of another type")
            line = node.start_mark.line
            return UsageError(
                f"{path}:{line + 1}: {text.splitlines()[line].strip()} looks like a {kind}, but is not a valid one",
                why=f"parsers read a {kind} from such text, and fail",
                fix=f"correct that line, or quote the value if it is text: '{node.value}'",
            )
    return UsageError(f"cannot read {path}: {error}", why="the parser fails at a value", fix="correct or quote it")


def _scalars(node: Any) -> Iterator[Any]:
    if isinstance(node, yaml.ScalarNode):
        yield node
    else:
        pairs = ((inner,) if isinstance(node, yaml.SequenceNode) else inner for inner in node.value)
        yield from (scalar for pair in pairs for inner in pair for scalar in _scalars(inner))
