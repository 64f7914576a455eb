"""Edits of a YAML's text: no other line changes, and no comment is lost but those on the lines of a removed value."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import yaml

from accel_fsdp.config import yaml_file
from accel_fsdp.config.schema import short_name

COLON = re.compile(r"\s*:")
GAP = re.compile(r"(?:\s|#.*)*")
"""Space and comments between the parts of a flow mapping."""
ALIAS = re.compile(r"\s*:\s*(\*[^\s,}\]]+)")


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
    """Applies edits in order to the result of `yaml_file.load`, both its values and its text.

    If the edited text doesn't parse to the values, because of an odd layout, the text is rewritten. Comments without a
    place in the new text come first.
    """
    text = document.source
    for edit in edits:
        try:
            text = _applied(document, text, edit)
        except yaml.YAMLError:  # the previous edit has broken the text
            text = _rewritten(document)
    document.source = text if document.is_json or yaml_file.reads_as(text, document) else _rewritten(document)


def _rewritten(document: Any) -> str:
    text = yaml_file.text_of(document)
    return "".join(line.lstrip() for line in _comments(document.source) if line.strip() not in text) + text


def _applied(document: Any, text: str, edit: Edit) -> str:
    mapping = (document.get(edit.section) or {}) if edit.section else document
    key = edit.key if edit.key in mapping else short_name(edit.section, edit.key)
    is_there = key in mapping
    if edit.new_key and is_there:
        text = _renamed(document, text, edit.section, key, edit.new_key)
        key = edit.new_key
    if edit.value is not None:
        key = key if key in mapping else edit.new_key or edit.key
        return _put(document, text, edit.section, key, yaml_file.as_scalar(edit.value))
    return _dropped(document, text, edit.section, key) if is_there and not edit.new_key else text


# Each of these changes the document's values first, and returns the text with the same change.


def _renamed(document: Any, text: str, section: str, key: str, new_key: str) -> str:
    mapping = document[section] if section else document
    mapping.insert(list(mapping).index(key), new_key, mapping.pop(key))
    name, _ = _entry(_mapping(text, section), key)
    return text[: name.start_mark.index] + _flow(new_key) + text[name.end_mark.index :]


def _dropped(document: Any, text: str, section: str, key: str) -> str:
    """Removes a key, and its section if that is empty then."""
    mapping = document[section] if section else document
    if section and len(mapping) == 1:
        return _dropped(document, text, "", section)
    del mapping[key]
    node = _mapping(text, section)
    name, value = _entry(node, key)
    if node.flow_style:
        return _without_flow(text, node, node.value.index((name, value)))
    start, end = text.rfind("\n", 0, name.start_mark.index) + 1, _line_end(text, _end(text, name, value))
    if not isinstance(value, yaml.CollectionNode):
        return text[:start] + text[end:]
    if _is_block(value) and isinstance(value, yaml.MappingNode):  # the comments after its last key move too
        end = max(end, text.rfind("\n", 0, value.end_mark.index) + 1)
    kept_comments = _comments(text[_line_end(text, name.end_mark.index) : end])
    if isinstance(value, yaml.MappingNode):
        kept_comments = [line.lstrip(" ") for line in kept_comments]
    return text[:start] + "".join(kept_comments) + text[end:]


def _put(document: Any, text: str, section: str, key: str, value: Any) -> str:
    """A new key comes last in its section, and a new section last in the document."""
    if section and not document.get(section):
        from ruamel.yaml.comments import CommentedMap

        is_there = section in document
        document[section] = CommentedMap({key: value})
        change = _replaced if is_there else _added
        return change(text, _mapping(text, ""), section, document[section])
    mapping = document[section] if section else document
    mapping[key] = value
    node = _mapping(text, section)
    change = _added if _entry(node, key) is None else _replaced
    return change(text, node, key, mapping[key])  # ruamel.yaml quotes it like the old value


def _replaced(text: str, node: Any, key: str, value: Any) -> str:
    name, old = _entry(node, key)
    start: int = old.start_mark.index
    end = _end(text, name, old)
    if start < name.end_mark.index:  # an alias: the node is that of its anchor
        start = ALIAS.match(text, name.end_mark.index).start(1)  # type: ignore[union-attr]
    if node.flow_style:
        space = " " if start == end else ""
        return text[:start] + space + _flow(value) + text[end:]
    if not _is_block(old) and not isinstance(value, dict):
        if text[start:end].endswith("\n"):
            end -= 1
        space = " " if start == end else ""
        return text[:start] + space + _block("", value, text).strip() + text[end:]
    colon = COLON.match(text, name.end_mark.index).end()  # type: ignore[union-attr]
    line_end, end = _line_end(text, colon), _line_end(text, end)
    tail = text[colon:line_end] if _is_block(old) else text[_end(text, name, old) : line_end]
    block = _block("", value, text).removesuffix("\n")
    comments = "".join(_comments(text[line_end:end]))
    if isinstance(value, dict):
        return text[:colon] + tail + block.lstrip("\n") + "\n" + comments + text[end:]
    return f"{text[:colon]} {block.strip()}{tail}{comments}{text[end:]}"


def _added(text: str, node: Any, key: str, value: Any) -> str:
    if node.flow_style:
        return _with_flow(text, node, key, value)
    at = _line_end(text, _end(text, *node.value[-1]))
    column = node.start_mark.column
    if column:  # after the comments on its section, before those on the next
        following = re.match(r"(?:[ \t]*(?:#.*)?\n)*", text[at:])[0].splitlines(keepends=True)  # type: ignore[index]
        count = next((i for i, line in enumerate(following) if line.startswith("#")), len(following))
        while count and not following[count - 1].strip():
            count -= 1
        at += len("".join(following[:count]))
    lines = _block(key, value, text).splitlines(keepends=True)
    gap = "" if text[:at].endswith("\n") else "\n"
    return text[:at] + gap + "".join(" " * column + line for line in lines) + text[at:]


def _without_flow(text: str, node: Any, at: int) -> str:
    """Removes an entry of a flow mapping, its comma, and its line if nothing else is on that."""
    start, end = node.value[at][0].start_mark.index, _end(text, *node.value[at])
    comma = _after_gap(text, end)
    if text[comma] != "," and at:
        comma = _after_gap(text, _end(text, *node.value[at - 1]))
    if text[comma] == ",":
        text, moved = text[:comma] + text[comma + 1 :], int(comma < start)
        start, end = start - moved, end - moved
    line, line_end = text.rfind("\n", 0, start) + 1, _line_end(text, end)
    before, head = text[:line] + "".join(_comments(text[start:end])), text[line:start]
    if not head.strip() and not text[end:line_end].partition("#")[0].strip():
        return before + text[line_end:]
    if at + 1 == len(node.value):
        return before + head.rstrip(" ") + text[end:]
    return before + head + re.sub(r"\A +(?![ #])", "", text[end:])


def _after_gap(text: str, at: int) -> int:
    return GAP.match(text, at).end()  # type: ignore[union-attr]


def _with_flow(text: str, node: Any, key: str, value: Any) -> str:
    """Adds an entry to a mapping in braces, on a separate line if the last entry has one."""
    entry = f"{_flow(key)}: {_flow(value)}"
    if not node.value:
        index = node.start_mark.index + 1
        return text[:index] + entry + text[index:]
    start, index = node.value[-1][0].start_mark.index, _end(text, *node.value[-1])
    indent = text[text.rfind("\n", 0, start) + 1 : start]
    comma = _after_gap(text, index)
    head = text[: comma + 1] if text[comma] == "," else f"{text[:index]},"
    tail = text[comma + 1 :] if text[comma] == "," else text[index:]
    same_line, newline, next_lines = tail.partition("\n")
    if indent.strip() or not newline or same_line.partition("#")[0].strip():
        return f"{head} {entry}{tail}"
    return f"{head}{same_line}\n{indent}{entry}\n{next_lines}"


def _mapping(text: str, section: str) -> Any:
    top = yaml.compose(text)
    return _entry(top, section)[1] if section else top


def _entry(node: Any, key: str) -> Any:
    return next(((name, value) for name, value in node.value if name.value == key), None)


def _is_block(node: Any) -> bool:
    return isinstance(node, yaml.CollectionNode) and not node.flow_style


def _end(text: str, name: Any, value: Any) -> int:
    """Where an entry ends: for PyYAML the comments behind a block are part of it."""
    while _is_block(value):
        name, value = value.value[-1] if isinstance(value, yaml.MappingNode) else (value, value.value[-1])
    if value.start_mark.index < name.start_mark.index:
        return ALIAS.match(text, name.end_mark.index).end()  # type: ignore[union-attr]
    end: int = value.end_mark.index
    return end


def _line_end(text: str, at: int) -> int:
    return text.find("\n", at - 1) + 1 or len(text)


def _comments(text: str) -> list[str]:
    return [line for line in text.splitlines(keepends=True) if not line.strip() or line.lstrip().startswith("#")]


def _block(key: str, value: Any, text: str) -> str:
    """`key: value` on separate lines; without a key, the text after the colon."""
    block = yaml_file.text_of({key or "key": value}, yaml_file.indent_of(text))
    return block if key else block.removeprefix("key:")


def _flow(value: Any) -> str:
    """A key or a value inside of braces."""
    plain = {str(key): _plain(inner) for key, inner in value.items()} if isinstance(value, dict) else _plain(value)
    return yaml.safe_dump([plain], default_flow_style=True, width=float("inf"), sort_keys=False).strip()[1:-1]


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, str) else value
