"""Edits of a loaded YAML; ruamel.yaml writes it back with its comments."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from accel_fsdp.config import yaml_file
from accel_fsdp.config.schema import short_name


@dataclass(frozen=True)
class Edit:
    """One repair: `key` of `section` is renamed to `new_key` and gets `value`; without both it is removed.

    The section is empty for the top level, and made if it is missing.
    """

    section: str
    key: str
    value: Any = None
    new_key: str = ""


def apply(document: Any, edits: Iterable[Edit]) -> None:
    """Applies edits in order to the result of `yaml_file.load`; comments that lose their place come first."""
    edits = list(edits)
    for edit in edits:
        _apply(document, edit)
    if edits and not document.is_json:
        text = yaml_file.text_of(document, yaml_file.indent_of(document.source))
        lines, kept = (list(map(str.strip, part.splitlines())) for part in (document.source, text))
        lost = [line for line in lines if line.startswith("#") and line not in kept]
        document.source = "".join(f"{line}\n" for line in lost) + text


def _apply(document: Any, edit: Edit) -> None:
    from ruamel.yaml.comments import CommentedMap

    if edit.section and not isinstance(document.get(edit.section), dict):
        if edit.value is None:
            return
        _put(document, edit.section, CommentedMap())
    mapping = document[edit.section] if edit.section else document
    key = edit.key if edit.key in mapping else short_name(edit.section, edit.key)
    if edit.new_key and key in mapping:
        _rename(mapping, key, edit.new_key)
        key = edit.new_key
    elif key not in mapping:
        key = edit.new_key or edit.key
    if edit.value is not None:
        _put(mapping, key, yaml_file.as_scalar(edit.value))
    elif key in mapping and not edit.new_key:
        _remove(mapping, key)
        if edit.section and not mapping:
            _remove(document, edit.section)


def _rename(mapping: Any, key: str, new_key: str) -> None:
    comments, place = mapping.ca.items.get(key), list(mapping).index(key)
    mapping.insert(place, new_key, mapping.pop(key))
    if comments:
        mapping.ca.items[new_key] = comments


def _put(mapping: Any, key: str, value: Any) -> None:
    """Sets a value. A new key comes last, before comments that are indented less."""
    if key in mapping or not mapping:
        mapping[key] = value
        return
    holder, last = _innermost(mapping, list(mapping)[-1])
    beside, below = _split(holder, last)
    column = mapping.lc.col or 0
    end = next((i for i, line in enumerate(below) if len(line) - len(line.lstrip()) < column), len(below))
    _attach(holder, last, beside, below[:end])
    mapping[key] = value
    _attach(mapping, key, "", below[end:])


def _remove(mapping: Any, key: str) -> None:
    """Removes a key with the comment on its line; comments on lines between come before the next key, or last."""
    names = list(mapping)
    place, value = names.index(key), mapping[key]
    comments = mapping.ca.items.get(key) or [None, None, None, None]
    inside = [line for line in _comment_lines(value) if line.lstrip().startswith("#")]
    if _is_block(value):
        inside = _lines([comments[2]])[1:] + inside
    column = mapping.lc.col or 0
    moved = [" " * column + line.lstrip() for line in (*_lines(comments[1] or []), *inside)]
    kept = moved + ([] if _is_block(value) else _split(mapping, key)[1])
    del mapping[key]
    mapping.ca.items.pop(key, None)
    if not kept or len(names) == 1:
        return
    if place + 1 < len(names):
        comments = mapping.ca.items.setdefault(names[place + 1], [None, None, None, None])
        comments[1] = [_token("".join(kept).lstrip(" "), column), *(comments[1] or [])]
    else:
        holder, last = _innermost(mapping, names[place - 1])
        beside, below = _split(holder, last)
        _attach(holder, last, beside, below + kept)


def _is_block(value: Any) -> bool:
    return hasattr(value, "ca") and not value.fa.flow_style() and len(value) > 0


def _innermost(holder: Any, key: Any) -> tuple[Any, Any]:
    """The last entry inside an entry: ruamel.yaml keeps the comments that follow there."""
    while _is_block(holder[key]):
        holder = holder[key]
        key = list(holder)[-1] if isinstance(holder, dict) else len(holder) - 1
    return holder, key


def _slot(holder: Any) -> int:
    """Where ruamel.yaml keeps the comments that follow an entry of a mapping, or of a list."""
    return 2 if isinstance(holder, dict) else 0


def _split(holder: Any, key: Any) -> tuple[str, list[str]]:
    """The comment beside an entry, and the lines of comments below it."""
    comments = holder.ca.items.get(key)
    token = comments[_slot(holder)] if comments else None
    beside, *below = token.value.splitlines(keepends=True) if token else [""]
    return beside.strip(), below


def _attach(holder: Any, key: Any, beside: str, below: list[str]) -> None:
    if not (beside or below):
        holder.ca.items.pop(key, None)
        return
    comments = holder.ca.items.setdefault(key, [None, None, None, None])
    old = comments[_slot(holder)]
    comments[_slot(holder)] = _token(f"{beside}\n{''.join(below)}", old.start_mark.column if old else 0)


def _token(text: str, column: int) -> Any:
    from ruamel.yaml.error import CommentMark
    from ruamel.yaml.tokens import CommentToken

    return CommentToken(text, CommentMark(column), None)


def _comment_lines(value: Any) -> Iterator[str]:
    """All comment lines inside a value, in order."""
    if not hasattr(value, "ca"):
        return
    opening, comments = value.ca.comment[1] if value.ca.comment else None, value.ca.items
    yield from _lines(opening or [])
    for key in value if isinstance(value, dict) else range(len(value)):
        before = (comments.get(key) or [None, None])[1] if isinstance(value, dict) else None
        yield from _lines(before or [])
        yield from _comment_lines(value[key])
        if not _is_block(value[key]):
            yield from _split(value, key)[1]


def _lines(tokens: list[Any]) -> list[str]:
    return re.findall(r".*\n", "".join(token.value for token in tokens if token))
