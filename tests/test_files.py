"""Files that commands change: only the text changes, not what else a user sees of the file."""

import json
import os
import stat
from pathlib import Path

import pytest
from checking import V2
from conftest import accel_fsdp

BROKEN = V2.replace("fsdp_version: 2", "fsdp_version: 2\n  fsdp_use_orig_params: true")
CHANGES = {"check": ["check", "--fix"], "migrate": ["migrate", "--to", "zero3", "--force"]}


def change(command: str, path: Path) -> None:
    words = CHANGES[command]
    assert accel_fsdp(words[0], path, *words[1:]).code == 0


@pytest.mark.parametrize("command", CHANGES)
def test_a_link_stays_one_and_its_target_changes(command: str, tmp_path: Path) -> None:
    target, link = tmp_path / "base.yaml", tmp_path / "link.yaml"
    target.write_text(BROKEN)
    link.symlink_to(target.name)
    change(command, link)
    assert link.is_symlink()
    assert target.read_text() != BROKEN


@pytest.mark.parametrize("command", CHANGES)
def test_permissions_stay(command: str, tmp_path: Path) -> None:
    path = tmp_path / "fsdp.yaml"
    path.write_text(BROKEN)
    path.chmod(0o640)
    change(command, path)
    assert path.read_text() != BROKEN
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.parametrize("command", CHANGES)
def test_line_ends_stay(command: str, tmp_path: Path) -> None:
    path = tmp_path / "fsdp.yaml"
    path.write_bytes(BROKEN.replace("\n", "\r\n").encode())
    change(command, path)
    text = path.read_bytes()
    assert text.count(b"\n") == text.count(b"\r\n") > 5


@pytest.mark.parametrize("indent", [None, 2, 4])
def test_json_stays_json(indent: int | None, tmp_path: Path) -> None:
    """Accelerate reads its config from JSON too, by the name of the file."""
    path = tmp_path / "config.json"
    fsdp = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "NO_WRAP", "fsdp_use_orig_params": True}
    content = {"distributed_type": "FSDP", "num_processes": 2, "mixed_precision": "no", "fsdp_config": fsdp}
    path.write_text(json.dumps(content, indent=indent) + "\n")
    assert accel_fsdp("check", "--fix", path).code == 0
    del fsdp["fsdp_use_orig_params"]
    assert path.read_text() == json.dumps(content, indent=indent) + "\n"


def test_a_new_file_is_not_written_as_json(tmp_path: Path) -> None:
    refused = accel_fsdp("config", "--yes", "--model", "gpt2", "-o", tmp_path / "fsdp.json")
    assert refused.code == 2
    assert "fsdp.yaml" in refused.output
    assert list(tmp_path.iterdir()) == []


def test_text_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"distributed_type: FSDP # \xe9\n")
    refused = accel_fsdp("check", "--fix", path)
    assert refused.code == 2
    assert "Traceback" not in refused.output


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everything")
def test_a_read_only_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "fsdp.yaml"
    path.write_text(BROKEN)
    path.chmod(0o444)
    assert accel_fsdp("check", "--fix", path).code == 1
    assert path.read_text() == BROKEN
