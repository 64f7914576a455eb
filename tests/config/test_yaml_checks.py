"""YAML files that a parser takes minutes for, or can't take: each is refused soon, with its line."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from checking import V2
from conftest import here

from accel_fsdp import config

SECONDS = 10
COMMANDS = {
    "check": "check bad.yaml",
    "config": "config --yes --from bad.yaml",
    "launch": "launch --dry-run bad.yaml script.py",
    "arguments": "check good.yaml --args bad.yaml",
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
INVALID = "{} looks like a {}"
REFUSED = {
    "gpu_ids: &a [*a]": "*a holds itself",
    "fsdp_config: &a {version: 2, ignored_modules: *a}": "*a holds itself",
    "fsdp_config: &a {<<: *a, version: 2}": "*a holds itself",
    "fsdp_config: &a {<<: [*a, *a], version: 2}": "*a holds itself",
    "num_machines: 2026-99-99": INVALID.format("num_machines: 2026-99-99", "date"),
    "num_machines: 2026-02-30 25:00:00": INVALID.format("num_machines: 2026-02-30 25:00:00", "date"),
    "gpu_ids: 2026-02-30": INVALID.format("gpu_ids: 2026-02-30", "date"),
    "num_machines: 0b_": INVALID.format("num_machines: 0b_", "number"),
    "debug: !!bool maybe": INVALID.format("debug: !!bool maybe", "boolean"),
    "machine_rank: 0\0": "the character U+0000",
    "machine_rank: 0\x1b": "the character U+001B",
    "machine_rank: 0\ufffe": "the character U+FFFE",
    **{
        f"num_processes: {number.format('9' * 5000)}": "a number of more than 1,000 characters"
        for number in ("{}", "'{}'", "[1, {}]", "0x{}", "-{}", "{}.5")
    },
}
"""A line, and what is said of it."""


@pytest.fixture
def refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Runs a command that refuses a file with this text; its message."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.yaml").write_text(V2)
    (tmp_path / "script.py").write_text("print()\n")

    def refuse(command: str, text: str, name: str = "bad.yaml") -> str:
        (tmp_path / name).write_text(text)
        finished = here(*COMMANDS[command].replace("bad.yaml", name).split())
        assert (finished.code, finished.printed) == (2, "")
        assert "Traceback" not in finished.output
        return finished.output

    return refuse


@pytest.mark.slow(but=8)
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", BOMBS)
def test_a_file_that_grows_is_refused_before_it_does(name: str, command: str, refusal: Callable[..., str]) -> None:
    start = time.process_time()
    message = refusal(command, f"distributed_type: FSDP\n{BOMBS[name]}")
    assert "bad.yaml:" in message
    assert "values" in message
    assert time.process_time() - start < SECONDS


@pytest.mark.parametrize("command", ["check", "launch", "arguments"])
@pytest.mark.parametrize("line", REFUSED, ids=range(len(REFUSED)))
def test_what_a_parser_cannot_take_is_named_with_its_line(line: str, command: str, refusal: Callable[..., str]) -> None:
    message = refusal(command, f"distributed_type: FSDP\n{line}\ndebug: false\n")
    assert f"bad.yaml:2: {REFUSED[line]}" in message


@pytest.mark.parametrize("command", ["check", "config", "launch"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1\nb: 2\n", "bad.yaml:2:2: expected ',' or ']'"),
        ("just text\n", "bad.yaml is a single value, not a mapping"),
        ("- a\n", "bad.yaml is a list, not a mapping"),
        ("", "bad.yaml holds no keys"),
    ],
)
def test_what_is_no_mapping_is_refused(text: str, message: str, command: str, refusal: Callable[..., str]) -> None:
    assert message in refusal(command, text)


def test_a_json_file_has_the_same_limits(tmp_path: Path, refusal: Callable[..., str]) -> None:
    many = {"distributed_type": "FSDP", "gpu_ids": [1] * 30_000}
    assert "values" in refusal("check", json.dumps(many, indent=0), "bad.json")
    large = f'{{\n"num_processes": {"9" * 5000}}}'  # Python converts 4,300 digits at most, and doesn't say which
    assert "bad.json:2: a number of more than 1,000 characters" in refusal("check", large, "bad.json")
    stars = tmp_path / "stars.json"
    stars.write_text(json.dumps({"distributed_type": "FSDP", "gpu_ids": "*a", "tpu_name": "*"}))
    assert config.read_config(stars)[0].values["gpu_ids"] == "*a"


@pytest.mark.parametrize(
    "text",
    [
        "x: &x {fsdp_version: 2}\nfsdp_config: {<<: *x, debug: *x}\n",
        "x: &x {a: 1, b: '*x'}\ny: &y {<<: *x, a: 0x10}\nfsdp_config: {c: null, <<: [*y, *x], b: 2026-01-31}\n",
        "x: &x [1, text]\ny: &y {a: *x, b: [*x, *x]}\nall: [*x, *y, *y, *x]\n",
    ],
)
def test_a_small_file_with_anchors_and_merges_is_read(text: str, tmp_path: Path) -> None:
    (path := tmp_path / "small.yaml").write_text(text)
    job, document = config.read_config(path)
    assert job.values == yaml.safe_load(text)
    assert document.source == text
