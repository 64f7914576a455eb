"""Refuses YAML texts that a parser can't take, or takes minutes for, and says in which line.

    yaml_checks.check_text(text, path)  # before any parser
    values = yaml_checks.plain_values(text, path)

All YAML files of users pass here before PyYAML or ruamel.yaml makes values of them.
"""

import contextlib
from pathlib import Path
from typing import Any

import yaml

from accel_fsdp.errors import UsageError

MOST_NODES, DEEPEST, LONGEST_NUMBER = 20_000, 100, 1_000
"""Limits of a YAML: keys and values with all aliases expanded, levels, and characters of a number."""
NO_VALUE = (ValueError, TypeError, IndexError, KeyError, AttributeError)
"""The errors of both parsers for a text that is not of its type, such as an impossible date: they name no line."""


def check_text(text: str, path: Path) -> None:
    """Refuses aliases that multiply a few bytes to more than a machine can hold, deep nesting, and endless numbers."""
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
                if event.implicit[0] and event.value[:1].isdigit() and len(event.value) > LONGEST_NUMBER:
                    raise _refusal(f"{path}:{line}: a number of more than {LONGEST_NUMBER:,} characters")
            elif isinstance(event, yaml.AliasEvent):
                if (size := sizes.get(anchor, 1)) is None:
                    raise _refusal(f"{path}:{line}: *{anchor} holds itself")
                count += size
            if count > MOST_NODES or len(incomplete) > DEEPEST:
                limits = f"{MOST_NODES:,} keys and values with aliases expanded, or {DEEPEST} levels"
                raise _refusal(f"{path}:{line}: more than {limits}, up to here")


def _refusal(what: str) -> UsageError:
    return UsageError(
        what, why="no settings are such, and a parser takes minutes for them", fix="correct that line, without aliases"
    )


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
        raise no_value(path, error) from error


def no_value(path: Path, error: Exception) -> UsageError:
    return UsageError(
        f"cannot read {path}: a value looks like a date, a number or a boolean, but is not a valid one: {error}",
        why="parsers convert such text, and fail",
        fix="correct it, or quote it if it is text",
    )
