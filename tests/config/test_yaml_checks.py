"""YAML files that a parser takes minutes for, or can't take: each is refused soon, with its line."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from checking import V2
from hypothesis import given
from hypothesis import strategies as st

from accel_fsdp import cli, config
from accel_fsdp.errors import guard

SECONDS = 10
SCRIPT = "script.py"
COMMANDS = {
    "check": ["check", "bad.yaml"],
    "config": ["config", "--yes", "--from", "bad.yaml"],
    "launch": ["launch", "--dry-run", "bad.yaml", SCRIPT],
    "arguments": ["check", "good.yaml", "--args", "bad.yaml"],
}


def levels(bottom: str, inner: str, names: int = 9, times: int = 9) -> str:
    """Mappings of which each takes the one before `times` times."""
    lines = [bottom]
    for level in range(1, names):
        before = ", ".join([f"*b{level - 1}"] * times)
        lines.append(f"b{level}: &b{level} {inner.format(before)}")
    return "\n".join(lines) + "\n"


BOMBS = {
    "merges": levels("b0: &b0 {x: 1}", "{{<<: [{}]}}"),
    "merges, one by one": levels("b0: &b0 {x: 1}", "{{<<: [{}], y: 1}}", 300, 2),
    "lists": levels("b0: &b0 [x]", "[{}]"),
    "mappings": levels("b0: &b0 {x: 1}", "{{x: [{}]}}"),
    "keys": levels("b0: &b0 [x]", "{{? [{}] : 1}}"),
    "a bomb in a section": levels("b0: &b0 {x: 1}", "{{<<: [{}]}}") + "fsdp_config: *b8\n",
    "many values": "gpu_ids: [" + "1, " * 300_000 + "]\n",
    "many levels": "gpu_ids: " + "[" * 300_000 + "\n",
}
HOLDS_ITSELF = {
    "a list": "gpu_ids: &a [*a]\n",
    "a mapping": "fsdp_config: &a {version: 2, ignored_modules: *a}\n",
    "a merge": "fsdp_config: &a {<<: *a, version: 2}\n",
    "merges": "fsdp_config: &a {<<: [*a, *a], version: 2}\n",
}


def refusal(command: str, text: str, folder: Path, monkeypatch: Any, capsys: Any, name: str = "bad.yaml") -> str:
    """The message of a command that refuses a file."""
    monkeypatch.chdir(folder)
    (folder / name).write_text(text)
    (folder / "good.yaml").write_text(V2)
    (folder / SCRIPT).write_text("print()\n")
    words = [name if word == "bad.yaml" else word for word in COMMANDS[command]]
    codes: list[int] = []
    assert guard(lambda: codes.append(cli.call(words))) == 2 or codes == [2]
    message: str = capsys.readouterr().err
    assert "Traceback" not in message
    return message


@pytest.mark.slow(but=8)
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", BOMBS)
def test_a_file_that_grows_is_refused_before_it_does(
    name: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start = time.process_time()
    message = refusal(command, f"distributed_type: FSDP\n{BOMBS[name]}", tmp_path, monkeypatch, capsys)
    assert "bad.yaml:" in message
    assert "values" in message
    assert time.process_time() - start < SECONDS


@pytest.mark.parametrize("command", ["check", "launch", "arguments"])
@pytest.mark.parametrize("name", HOLDS_ITSELF)
def test_a_value_that_holds_itself_is_refused_with_its_line(
    name: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refusal(command, f"distributed_type: FSDP\n{HOLDS_ITSELF[name]}", tmp_path, monkeypatch, capsys)
    assert "bad.yaml:2: *a holds itself" in message


@pytest.mark.parametrize("command", ["check", "launch", "arguments"])
@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("num_machines: 2026-99-99", "date"),
        ("num_machines: 2026-02-30 25:00:00", "date"),
        ("gpu_ids: 2026-02-30", "date"),
        ("num_machines: 0b_", "number"),
        ("debug: !!bool maybe", "boolean"),
    ],
)
def test_a_value_of_no_type_is_named_with_its_line(
    line: str, kind: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    text = refusal(command, f"distributed_type: FSDP\n{line}\ndebug: false\n", tmp_path, monkeypatch, capsys)
    assert f"bad.yaml:2: {line} looks like a {kind}" in text


@pytest.mark.parametrize("command", ["check", "launch", "arguments"])
@pytest.mark.parametrize(("character", "name"), [("\0", "U+0000"), ("\x1b", "U+001B"), ("\ufffe", "U+FFFE")])
def test_an_unprintable_character_is_named_with_its_line(
    character: str, name: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    text = f"distributed_type: FSDP\nmachine_rank: 0{character}\n"
    assert f"bad.yaml:2: the character {name}" in refusal(command, text, tmp_path, monkeypatch, capsys)


def test_a_json_file_has_the_same_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    many = json.dumps({"distributed_type": "FSDP", "gpu_ids": [1] * 30_000}, indent=0)
    assert "values" in refusal("check", many, tmp_path, monkeypatch, capsys, "bad.json")
    stars = tmp_path / "stars.json"
    stars.write_text(json.dumps({"distributed_type": "FSDP", "gpu_ids": "*a", "tpu_name": "*"}))
    assert config.read_config(stars)[0].values["gpu_ids"] == "*a"


KEYS = st.sampled_from(["x", "y", "debug", "num_machines", "fsdp_version"])
SCALARS = st.sampled_from(["1", "true", "text", "'*a'", "2026-01-31", "null", "0x10"])


@st.composite
def texts(draw: st.DrawFn) -> str:
    """Small YAML with anchors, aliases in lists and mappings, and merges of one mapping or several."""
    lines, anchors = ["distributed_type: FSDP"], list[str]()
    for number in range(draw(st.integers(1, 5))):
        earlier = st.sampled_from(anchors).map("*{}".format) if anchors else SCALARS
        entries = draw(st.dictionaries(KEYS, SCALARS | earlier, max_size=3))
        parts = [f"{key}: {value}" for key, value in entries.items()]
        if anchors and draw(st.booleans()):
            merged = draw(st.lists(st.sampled_from(anchors).map("*{}".format), min_size=1, max_size=3))
            one = len(merged) == 1 and draw(st.booleans())
            parts.insert(draw(st.integers(0, len(parts))), f"<<: {merged[0] if one else '[' + ', '.join(merged) + ']'}")
        lines.append(f"s{number}: &a{number} {{{', '.join(parts)}}}")
        anchors.append(f"a{number}")
    lines.append(f"all: [{', '.join(f'*{name}' for name in anchors)}]")
    return "\n".join(lines) + "\n"


@given(text=texts())
def test_small_files_with_anchors_and_merges_are_read_as_before(text: str, tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(text)
    job, document = config.read_config(path)
    assert job.values == yaml.safe_load(text)
    assert document.source == text
