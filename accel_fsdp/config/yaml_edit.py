"""Edits of a ruamel.yaml document that lose no comment but the one on the line of a removed key.

ruamel.yaml hangs the comment lines before a key on the key before it, so taking a key out would take out what is said
about its neighbour. Here such lines move to the key that now stands before them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import CommentMark
from ruamel.yaml.tokens import CommentToken

from accel_fsdp.config.schema import short_name


@dataclass(frozen=True)
class Edit:
    """One repair: `key` of `section` is renamed to `new_key` and gets `value`; dropped when neither is given.

    The section is empty for the top level, and made if it is missing.
    """

    section: str
    key: str
    value: Any = None
    new_key: str = ""


def apply(document: Any, edits: Iterable[Edit]) -> None:
    """Applies edits to a ruamel.yaml document in place and in order; comments stay."""
    for edit in edits:
        _apply(document, edit)


def as_scalar(value: Any) -> Any:
    """Text in quotes where PyYAML would read it as something else, such as no, on or 1e8; other values as they are."""
    import yaml
    from ruamel.yaml.scalarstring import SingleQuotedScalarString

    try:
        same = not isinstance(value, str) or yaml.safe_load(value) == value
    except yaml.YAMLError:  # an unfinished quote, or a control character, which the emitter escapes by itself
        same = not value.isprintable()
    return value if same else SingleQuotedScalarString(value)


def _apply(document: Any, edit: Edit) -> None:
    place = (document.get(edit.section) or {}) if edit.section else document
    key = edit.key if edit.key in place else short_name(edit.section, edit.key)
    if edit.new_key and key in place:
        rename(place, key, edit.new_key)
        key = edit.new_key
    if edit.value is not None:
        put(document, edit.section, key if key in place else edit.new_key or edit.key, as_scalar(edit.value))
    elif not edit.new_key and key in place:
        drop(document, edit.section, key)


def drop(document: Any, section: str, key: str) -> None:
    """Takes `key` out of a section, or out of the top level if `section` is empty; an emptied section goes too.

    A missing key is no error.
    """
    place: Any = (document.get(section) or {}) if section else document
    if key not in place:
        return
    if section and len(place) == 1:
        drop(document, "", section)
        return
    lines = _lines_of(place, key)
    if isinstance(place[key], CommentedMap):
        lines = "".join(line.lstrip(" ") for line in lines.splitlines(keepends=True))
    before = list(place)[: list(place).index(key)]
    place.pop(key)
    place.ca.items.pop(key, None)
    if before:
        _add_lines(*_last_leaf(place, before[-1]), lines)
    else:
        _add_first_lines(document, section, lines)


def rename(place: Any, key: str, new_key: str) -> None:
    position, token, comments = list(place).index(key), _token(place, key), place.ca.items.pop(key, None)
    place.insert(position, new_key, place.pop(key))
    if comments:
        place.ca.items[new_key] = comments
    if token and token.start_mark.column:
        token.start_mark.column += len(new_key) - len(key)


def put(document: Any, section: str, key: str, value: Any) -> None:
    """Sets `key`; a new one comes last in its section, and a new section last in the document."""
    if section and not document.get(section):
        _append(document, section, CommentedMap({key: value}), nested=False)
    elif key in (place := document[section] if section else document):
        token = _token(place, key)
        if token and token.start_mark.column:  # the comment on the line stays as far from the value as it was
            token.start_mark.column += len(str(value)) - len(str(place[key]))
        place[key] = value
    else:
        _append(place, key, value, nested=bool(section))


def _append(place: Any, key: str, value: Any, nested: bool) -> None:
    """Adds a key behind the last one; what is said there about the next section stays behind the new key."""
    following = ""
    if key not in place and place:
        following = _take_following(*_last_leaf(place, list(place)[-1]), nested)
    place[key] = value
    _add_lines(*_last_leaf(place, key), following)


def _last_leaf(place: Any, key: Any) -> tuple[Any, Any]:
    """Where the comment lines behind `key` hang: on the last line of its value."""
    value = place[key]
    while isinstance(value, CommentedMap | CommentedSeq) and value and not value.fa.flow_style():
        place = value
        key = list(value)[-1] if isinstance(value, CommentedMap) else len(value) - 1
        value = place[key]
    return place, key


def _slot(place: Any) -> int:
    return 2 if isinstance(place, CommentedMap) else 0


def _token(place: Any, key: Any) -> Any:
    found = place.ca.items.get(key)
    return found[_slot(place)] if found else None


def _lines_after(place: Any, key: Any) -> str:
    token = _token(place, key)
    return token.value.partition("\n")[2] if token else ""


def _lines_of(place: Any, key: Any) -> str:
    """All whole comment lines that would go with `key`: in and behind its value, and before it where it holds them."""
    value, held = place[key], place.ca.items.get(key) or [None, None]
    before = held[1] if isinstance(place, CommentedMap) and held[1] else []  # so it is behind a flow collection
    lines = "".join(token.value for token in before) + _lines_after(place, key)
    if isinstance(value, CommentedMap):
        first = (value.ca.comment or [None, None])[1] or []
        inside = [_lines_of(value, name) for name in value if name in value.ca.items or _is_node(value[name])]
        return lines + "".join([token.value for token in first] + inside)
    if isinstance(value, CommentedSeq):
        return lines + "".join(_lines_of(value, index) for index in range(len(value)))
    return lines


def _is_node(value: Any) -> bool:
    return isinstance(value, CommentedMap | CommentedSeq)


def _new_token(text: str) -> Any:
    return CommentToken(text, CommentMark(0), None)


def _add_lines(place: Any, key: Any, lines: str) -> None:
    if not lines:
        return
    token = _token(place, key)
    if token:
        token.value = token.value + ("" if token.value.endswith("\n") else "\n") + lines
    else:
        place.ca.items[key] = [None] * 4
        place.ca.items[key][_slot(place)] = _new_token("\n" + lines)


def _add_first_lines(document: Any, section: str, lines: str) -> None:
    token = _token(document, section) if section else None
    if not lines:
        return
    if token:
        token.value = token.value + lines
    elif section:  # the same list hangs on the section and on the key that holds it
        held = document.ca.items.setdefault(section, [None] * 4)
        held[3] = held[3] or []
        held[3].append(_new_token(lines))
        document[section].ca.comment = [None, held[3]]
    else:
        first = (document.ca.comment or [None, None])[1] or []
        document.ca.comment = [None, [*first, _new_token(lines)]]


def _take_following(place: Any, key: Any, nested: bool) -> str:
    """Takes off the lines behind a key that belong to what follows its section: from the first dedented one on."""
    token = _token(place, key)
    if not token:
        return ""
    head, _, tail = token.value.partition("\n")
    lines = tail.splitlines(keepends=True)
    start = next((i for i, line in enumerate(lines) if line.startswith("#")), len(lines)) if nested else 0
    while start and not lines[start - 1].strip():
        start -= 1
    token.value = head + "\n" + "".join(lines[:start])
    if not token.value.strip("\n"):
        del place.ca.items[key]
    return "".join(lines[start:])
