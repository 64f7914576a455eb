"""Edits of a YAML lose no whole comment line, and change no other key."""

from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_fsdp.config import Edit, apply, dump
from accel_fsdp.config.yaml_file import _round_trip

Place = tuple[str, str]
"""A section and a key."""

TEXT = """\
# top

a: 1  # eol a
# before s
s:  # eol s
  # before b
  b: 1  # eol b

  # before c
  c: text
  # before d
  d: [1, 2]  # eol d
  # end of s
# before t
t:
  # before e
  e: {f: 1}
  # before g
  g:
    # before h
    h: 1
# before i
i:
- 1  # eol 1
- 2
# before j
j: 2
# end
"""
FLOW = """\
# top
{
  # before a
  a: 1,  # eol a
  # before s
  s: {
    # before b
    b: 1,  # eol b

    # before c
    c: text  # eol c, with a comma
    # behind c
    ,
    # before d
    d: [1, 2],  # eol d
    # end of s
  },
  # before i
  i: [
    # before 1
    1
  ], j: 2  # eol j
  # end
}
# foot
"""
FLOW_KEYS = [("", key) for key in "asij"] + [("s", key) for key in "bcd"]
KEYS = [("", key) for key in "astij"] + [("s", key) for key in "bcd"] + [("t", key) for key in "eg"]


def read(text: str) -> Any:
    document = _round_trip().load(text)
    document.source, document.is_json = text, False
    return document


def comments(text: str) -> list[str]:
    return sorted(line.strip() for line in text.splitlines() if line.strip().startswith("#"))


def edited(doomed: list[Place], new: list[Place], text: str) -> str:
    """The text without the doomed keys and with the new ones; it says what PyYAML then reads in it."""
    document, wanted = read(text), yaml.safe_load(text)
    for section, key in new:
        (wanted.setdefault(section, {}) if section else wanted)[key] = 7
    for section, key in doomed:
        (wanted.get(section, {}) if section else wanted).pop(key, None)
    apply(document, [*(Edit(*place, 7) for place in new), *(Edit(*place) for place in doomed)])
    assert yaml.safe_load(dump(document)) == {key: value for key, value in wanted.items() if value != {}}
    return dump(document)


def some(places: list[Place]) -> st.SearchStrategy[list[Place]]:
    return st.lists(st.sampled_from(places), unique=True, max_size=9)


@settings(max_examples=100)
@given(doomed=some(KEYS), new=some([("", "x"), ("s", "y"), ("t", "z"), ("n", "x"), ("n", "y")]))
def test_no_comment_line_is_lost(doomed: list[Place], new: list[Place]) -> None:
    text = edited(doomed, new, TEXT)
    assert comments(text) == comments(TEXT) or text.strip() == "{}"


@settings(max_examples=100)
@given(doomed=some(FLOW_KEYS), new=some([("", "x"), ("s", "y"), ("n", "z")]))
def test_no_comment_line_between_braces_is_lost(doomed: list[Place], new: list[Place]) -> None:
    """Nor is a comment beside a key that stays: in the one line that is left, each becomes a line of its own."""
    text = edited(doomed, new, FLOW)
    assert set(comments(FLOW)) <= set(comments(text))
    kept = {place for place in FLOW_KEYS if place not in doomed and ("", place[0]) not in doomed}
    assert all(f"# eol {key}" in text for _, key in kept & {("", "a"), ("", "j"), ("s", "b"), ("s", "c"), ("s", "d")})


@pytest.mark.parametrize(("section", "key"), KEYS)
def test_a_renamed_key_keeps_place_and_comments(section: str, key: str) -> None:
    document = read(TEXT)
    apply(document, [Edit(section, key, new_key="z" * len(key))])
    lines = zip(TEXT.splitlines(), dump(document).splitlines(), strict=True)
    ((old, new),) = ((old, new) for old, new in lines if old != new)
    assert new == old.replace(f"{key}:", f"{'z' * len(key)}:", 1)
