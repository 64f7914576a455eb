"""Edits of a loaded YAML; ruamel.yaml writes the values, and the comments of its text are put back line by line."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, NamedTuple

import yaml

from accel_fsdp.config import yaml_file
from accel_fsdp.config.schema import short_name

LINE = re.compile(r"""((?:(?<![^\s\[{,])(?:"(?:\\.|[^"\\])*"|'(?:''|[^'])*')|(?<!\s)#|[^#])*?)(\s*(?:^|(?<=\s))#.*)?""")
"""A line of YAML, and the comment at its end."""
KEY = re.compile(r"(?:\s|- |[{,])*['\"]?([^\s'\"#:{\[,]+)['\"]?:(?=\s|$)")


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
    """Applies edits in order to the result of `yaml_file.load`; a renamed key takes its comments along."""
    edits = list(edits)
    for edit in edits:
        _apply(document, edit)
    if edits and not document.is_json:
        _without_comments(document)
        bare = yaml_file.text_of(document, yaml_file.indent_of(document.source))
        renamed = {edit.key: edit.new_key for edit in edits if edit.new_key}
        document.source = _commented(bare, document.source, renamed)


def _apply(document: Any, edit: Edit) -> None:
    from ruamel.yaml.comments import CommentedMap

    if edit.section and not isinstance(document.get(edit.section), dict):
        if edit.value is None:
            return
        document[edit.section] = CommentedMap()
    mapping = document[edit.section] if edit.section else document
    key = edit.key if edit.key in mapping else short_name(edit.section, edit.key)
    if edit.new_key and key in mapping:
        mapping.insert(list(mapping).index(key), edit.new_key, mapping.pop(key))
        key = edit.new_key
    elif key not in mapping:
        key = edit.new_key or edit.key
    if edit.value is not None:
        mapping[key] = yaml_file.as_scalar(edit.value)
    elif key in mapping and not edit.new_key:
        del mapping[key]
        if edit.section and not mapping:
            del document[edit.section]


def _without_comments(value: Any) -> None:
    if hasattr(value, "ca"):
        value.ca.items.clear()
        value.ca.comment, value.ca.end = None, []
        for inner in value.values() if isinstance(value, dict) else value:
            _without_comments(inner)


class Line(NamedTuple):
    """A line of a text: what it says, the comment behind it, and the key that it begins with."""

    text: str
    code: str
    comment: str
    key: str


def _lines(text: str, renamed: Mapping[str, str]) -> list[Line]:
    lines = []
    for line in text.splitlines():
        match = LINE.fullmatch(line)
        code, comment = (match[1].rstrip(), match[2] or "") if match else (line, "")
        key = KEY.match(code)
        name = renamed.get(key[1], key[1]) if key else code.strip()
        lines.append(Line(line, code, comment, name))
    return lines


def _commented(bare: str, source: str, renamed: Mapping[str, str]) -> str:
    """The text `bare` with the comments and the empty lines of `source`."""
    merged = list(_merged(_lines(source, renamed), _lines(bare, {}), bare))
    text = "".join(f"{line}\n" for line in _dedented(merged))
    try:
        if yaml.safe_load(text) == yaml.safe_load(bare):
            return text
    except yaml.YAMLError:
        pass
    return "".join(f"{line}\n" for line in source.splitlines() if line.lstrip().startswith("#")) + bare


def _dedented(lines: list[str]) -> Iterator[str]:
    """The lines, of which no comment is deeper than both keys around it: its section may be gone."""
    depths = [0 if re.match(r"\s*(#|$)", line) else _indent(line) + 1 for line in lines]
    for number, line in enumerate(lines):
        before, behind = filter(None, reversed(depths[:number])), filter(None, depths[number:])
        deepest = max(next(before, 1), next(behind, 1)) - 1
        yield line if depths[number] or _indent(line) <= deepest else " " * deepest + line.lstrip()


def _indent(text: str) -> int:
    return len(text) - len(text.lstrip())


def _merged(old: list[Line], new: list[Line], bare: str) -> Iterator[str]:
    coded = [number for number, line in enumerate(old) if line.code]
    matcher = SequenceMatcher(None, [old[n].key for n in coded], [line.key for line in new], autojunk=False)
    written = 0
    for kind, first, last, start, end in matcher.get_opcodes():
        for number in coded[first:last]:  # the lines up to this one, which the new text has or has not
            yield from (line.text for line in old[written:number])
            written, line = number + 1, old[number]
            if kind == "equal":
                now = new[start + coded[first:last].index(number)]
                is_same = now.text.split() == line.code.split()
                yield line.text if is_same else now.text + line.comment
            elif line.comment and any(f"{key}:" in bare for key in (line.key, *re.findall(r"[\w.]+(?=:)", line.code))):
                yield line.comment.strip()
        for now in () if kind == "equal" else new[start:end]:
            floor = max(_indent(now.text), 1)
            while written < len(old) and not old[written].code and _indent(old[written].text) >= floor:
                yield old[written].text
                written += 1
            yield now.text
    yield from (line.text for line in old[written:])
