"""Refuses YAML texts that a parser can't take, or takes minutes for, and says in which line.

    yaml_checks.check_text(text, path)  # before any parser
    values = yaml_checks.plain_values(text, path)

All YAML files of users pass here before PyYAML or ruamel.yaml makes values of them: aliases and merges multiply a few
bytes to more than a machine can hold.
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from accel_fsdp.errors import UsageError

LONGEST_NUMBER = 1_000
"""Characters of a number: Python converts 4,300 digits at most, and needs a minute for 100,000 parts in base 60."""
MOST_NODES = 20_000
"""The most keys and values of a YAML with all aliases expanded: Accelerate and messages turn values into text."""
KINDS = {"timestamp": "date", "int": "number", "float": "number", "bool": "boolean"}
NO_VALUE = (ValueError, TypeError, IndexError, KeyError, AttributeError)
"""The errors of both parsers for a text that is not of its type, such as an impossible date: they name no line."""


def check_text(text: str, path: Path) -> None:
    """Refuses numbers of absurd length, and aliases of absurd size."""
    _check_numbers(text, path)
    if "*" in text or len(text) > MOST_NODES:
        with contextlib.suppress(yaml.YAMLError):  # the parser reports it
            _check_size(text, path)


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
    except NO_VALUE:
        refuse_scalar(path, yaml.compose(text), yaml.SafeLoader("").construct_object)
        raise


def refuse_scalar(path: Path, top: Any, construct: Callable[[Any], Any]) -> None:
    """Refuses the first value that a parser can't construct, such as an impossible date.

    `top` is that parser's node of the whole text, and `construct` its method that makes a value of a node.
    """
    for key, node in _scalars(top):
        try:
            construct(node)
        except NO_VALUE as error:
            kind = KINDS.get(node.tag.rpartition(":")[2], "value of another type")
            raise UsageError(
                f"{path}:{node.start_mark.line + 1}: {f'{key}: ' * bool(key)}{node.value} looks like a {kind}, but is "
                "not a valid one",
                why=f"parsers read a {kind} from such text, and fail: {error}",
                fix=f"correct that line, or quote the value if it is text: '{node.value}'",
            ) from error


def _scalars(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """The scalars of a node, each with the key that it is under; empty for a key."""
    if node.id == "scalar":
        yield key, node
    elif node.id == "sequence":
        for inner in node.value:
            yield from _scalars(inner, key)
    else:
        for name, inner in node.value:
            yield from _scalars(name)
            yield from _scalars(inner, str(name.value))


def _check_size(text: str, path: Path) -> None:
    """Counts keys and values with each alias written out; a merge counts as all that it merges."""
    count, sizes = 0, dict[str, int | None]()  # None for a value that isn't complete
    incomplete = list[tuple[str, int]]()
    for event in yaml.parse(text):
        line = event.start_mark.line + 1 if event.start_mark else 1
        anchor: str = getattr(event, "anchor", None) or ""
        if isinstance(event, yaml.AliasEvent):
            size = sizes.get(anchor, 1)
            if size is None:
                raise _refusal(f"{path}:{line}: *{anchor} holds itself")
            count += size
        elif isinstance(event, yaml.CollectionStartEvent):
            incomplete.append((anchor, count))
            sizes[anchor] = None
            count += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = incomplete.pop()
            sizes[anchor] = count - before
        elif isinstance(event, yaml.ScalarEvent):
            sizes[anchor] = 1
            count += 1
        if count > MOST_NODES:
            raise _refusal(f"{path}:{line}: more than {MOST_NODES:,} keys and values up to here, with aliases expanded")


def _refusal(what: str) -> UsageError:
    return UsageError(
        what,
        why="no settings are so many, and a parser takes minutes for them",
        fix="write the settings out without aliases (*name) and merges (<<)",
    )


def _check_numbers(text: str, path: Path) -> None:
    """Refuses a number of absurd length, before a parser converts it."""
    if match := re.search(rf"(?<![\w:.])\d[\da-fx:_.]{{{LONGEST_NUMBER},}}", text, re.IGNORECASE):
        *lines, line = text[: match.start()].split("\n")
        key = re.search(r"([\w.-]+)['\"]?\s*:[^:]*$", line)
        place = f"{path}:{len(lines) + 1}: {key[1]}" if key else f"{path}:{len(lines) + 1}"
        raise UsageError(
            f"{place}: a number of more than {LONGEST_NUMBER:,} characters",
            why="no setting has such a value, and a parser refuses it, or takes minutes for it",
            fix="correct that line",
        )
