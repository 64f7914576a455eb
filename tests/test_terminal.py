"""What other people wrote into files reaches the terminal as text, never as commands for it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import accel_fsdp
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

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
    assert str(error) == ("error: tensor \\x1b[2Jx\\r\\u202ey \\udce4\n  why: line one\\nline two\n  fix: none\\x9b")


FORGED = "forged: exported and verified"
NAME = f"w\n{FORGED}\n  why: {FORGED}"


def _in_safetensors(folder: Path) -> list[str]:
    save_file({NAME: torch.ones(1)}, folder / "model.safetensors", {"format": "pt"})
    return ["export", str(folder), str(folder / "out")]


def _in_damaged_header(folder: Path) -> list[str]:
    header = json.dumps({NAME: {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    return ["export", str(folder), str(folder / "out")]


def _in_index(folder: Path) -> list[str]:
    _in_safetensors(folder)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    listed = {"weight_map": {f"other{NAME}": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(listed))
    return ["export", str(folder), str(folder / "out")]


def _in_pickle(folder: Path) -> list[str]:
    torch.save({NAME: torch.ones(1)}, folder / "model.pth")
    return ["export", str(folder), str(folder / "out")]


def _in_yaml_key(folder: Path) -> list[str]:
    text = f"distributed_type: FSDP\nfsdp_config: {{fsdp_version: 2, {json.dumps('fsdp_' + NAME)}: 1}}\n"
    (folder / "fsdp.yaml").write_text(text)
    return ["check", str(folder / "fsdp.yaml")]


def _in_yaml_to_migrate(folder: Path) -> list[str]:
    _in_yaml_key(folder)
    return ["migrate", str(folder / "fsdp.yaml"), "--to", "fsdp1", "--dry-run"]


def _in_file_name(folder: Path) -> list[str]:
    inner = folder / f"checkpoint-1{NAME.replace('/', '')}"
    inner.mkdir()
    (inner / "model.safetensors").write_bytes(b"")
    return ["export", str(inner), str(folder / "out")]


def _in_list(folder: Path) -> list[str]:
    _in_file_name(folder)
    return ["export", str(folder), "--list"]


PLACES = (
    *(_in_safetensors, _in_damaged_header, _in_index, _in_pickle),
    *(_in_yaml_key, _in_yaml_to_migrate, _in_file_name, _in_list),
)


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("place", PLACES)
def test_a_name_adds_no_line(place: Callable[[Path], list[str]], tmp_path: Path) -> None:
    """Names of tensors, keys, modules, folders and models hold line feeds: what follows them begins no line."""
    if place not in (_in_yaml_key, _in_yaml_to_migrate):
        (tmp_path / "config.json").write_text(
            '{"model_type": "llama", "num_hidden_layers": 0, "tie_word_embeddings": true}'
        )
    shown = accel_fsdp(*place(tmp_path)).output
    assert "forged" in shown
    assert not [line for line in shown.splitlines() if line.strip().removeprefix("why: ").startswith(FORGED)]


@given(st.text(st.characters(blacklist_categories=())))
def test_what_is_printed_can_be_encoded_and_holds_no_control(text: str) -> None:
    shown = printable(text)
    shown.encode()
    assert all(letter in "\n\t" or letter.isprintable() or ord(letter) > 0x9F for letter in shown)


@pytest.mark.parametrize("text", ["plain", "tab\tand\nline", "Größe 日本 🙂"])
def test_what_is_plain_stays(text: str) -> None:
    assert printable(text) == text
