"""Edits the text of a YAML in place: flow mappings over several lines keep their lines and comments."""

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

Cut = tuple[int, int, str]
"""From where to where another text comes in place."""


def splice(source: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """The text of `before` with what `after` says otherwise; whether it reads as `after` is for the caller to check."""
    cuts = _cuts(source, yaml.compose(source), before, after)
    for start, end, text in sorted(cuts, reverse=True):
        source = source[:start] + text + source[end:]
    return source


def _cuts(source: str, node: Any, before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Cut]:
    entries, old, new = node.value, list(before), list(after)
    if len(entries) != len(old):  # merge keys
        return
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for kind, start, end, new_start, new_end in matcher.get_opcodes():
        if kind == "equal" or (kind == "replace" and end - start == new_end - new_start):
            for entry, name, new_name in zip(entries[start:end], old[start:end], new[new_start:new_end], strict=True):
                yield from _changed(source, entry, (name, before[name]), (new_name, after[new_name]))
            continue
        if kind in ("delete", "replace"):
            yield _removed(source, node, start, end)
        if kind in ("insert", "replace") and start:
            added = [(name, after[name]) for name in new[new_start:new_end]]
            yield _added(source, node, start - 1, added)


def _changed(source: str, entry: Any, old: tuple[str, Any], new: tuple[str, Any]) -> Iterator[Cut]:
    key, value = entry
    if old[0] != new[0]:
        yield key.start_mark.index, key.end_mark.index, _flow(new[0])
    if isinstance(value, yaml.MappingNode) and isinstance(new[1], Mapping):
        yield from _cuts(source, value, old[1], new[1])
    elif old[1] != new[1] or type(old[1]) is not type(new[1]):
        yield value.start_mark.index, value.end_mark.index, _flow(new[1])


def _removed(source: str, node: Any, start: int, end: int) -> Cut:
    """Up to the next entry; of the last ones from the end of the entry before."""
    entries = node.value
    if not node.flow_style:
        first = source.rfind("\n", 0, entries[start][0].start_mark.index) + 1
        return first, source.find("\n", entries[end - 1][1].end_mark.index - 1) + 1, ""
    if end < len(entries):
        return entries[start][0].start_mark.index, entries[end][0].start_mark.index, ""
    first = entries[start - 1][1].end_mark.index if start else entries[0][0].start_mark.index
    return first, entries[-1][1].end_mark.index, ""


def _added(source: str, node: Any, behind: int, entries: list[tuple[str, Any]]) -> Cut:
    """Behind an entry: on lines of their own where that entry has one."""
    key, value = node.value[behind]
    line = source.rfind("\n", 0, key.start_mark.index) + 1
    indent = source[line : key.start_mark.index]
    gap = f"\n{indent}" if not indent.strip() else " "
    end = len(source[: value.end_mark.index].rstrip()) if not node.flow_style else value.end_mark.index
    texts = [f"{_flow(name)}: {_flow(content)}" for name, content in entries]
    return end, end, "".join(f"{',' if node.flow_style else ''}{gap}{text}" for text in texts)


def _flow(value: Any) -> str:
    plain = {str(key): inner for key, inner in value.items()} if isinstance(value, Mapping) else value
    plain = str(value) if isinstance(value, str) else plain
    text = yaml.safe_dump(plain, default_flow_style=True, width=float("inf"), sort_keys=False)
    return text.removesuffix("...\n").strip()
