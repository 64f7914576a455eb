"""What other people wrote into files reaches the terminal as text, never as commands for it."""

import json
from pathlib import Path

import pytest
from conftest import accel_fsdp
from hypothesis import given
from hypothesis import strategies as st

from accel_fsdp.errors import UserError, printable

RED = "\x1b]0;owned\x07\x1b[31m"


def test_a_key_of_a_yaml_cannot_colour_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "fsdp.yaml"
    path.write_text(f"distributed_type: FSDP\n{json.dumps('fsdp' + RED)}: 1\nfsdp_config: {{fsdp_version: 2}}\n")
    shown = accel_fsdp("check", path).output
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert "\\x1b[31m" in shown


def test_an_error_spells_controls_out() -> None:
    error = UserError("tensor \x1b[2Jx\r\u202ey \udce4", why="line one\nline two", fix="none\x9b")
    assert str(error) == ("error: tensor \\x1b[2Jx\\r\\u202ey \\udce4\n  why: line one\nline two\n  fix: none\\x9b")


@given(st.text(st.characters(blacklist_categories=())))
def test_what_is_printed_can_be_encoded_and_holds_no_control(text: str) -> None:
    shown = printable(text)
    shown.encode()
    assert all(letter in "\n\t" or letter.isprintable() or ord(letter) > 0x9F for letter in shown)


@pytest.mark.parametrize("text", ["plain", "tab\tand\nline", "Größe 日本 🙂"])
def test_what_is_plain_stays(text: str) -> None:
    assert printable(text) == text
