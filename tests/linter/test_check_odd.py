"""Odd files and the linter: it ends soon, without a traceback, and its repairs never make a file worse."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from checking import DDP, V2, codes_of, findings, subject
from conftest import SFT
from hypothesis import given, settings
from hypothesis import strategies as st
from test_check import GOLDEN

from accel_fsdp import cli, linter
from accel_fsdp.errors import UsageError, guard

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
)
SECTIONS = ("fsdp_config", "parallelism_config", "deepspeed_config", "dynamo_config", "fp8_config", "gpu_ids")
ODD: dict[str, bytes] = {
    "aliases that explode": (V2 + BOMB + "gpu_ids: *a11\nfsdp_config2: *a11\n").encode(),
    "a section of aliases": (BOMB + V2.replace("fsdp_version: 2", "fsdp_version: *a11")).encode(),
    "a list that holds itself": V2.encode() + b"gpu_ids: &a [*a]\n",
    "a section that holds itself": b"distributed_type: FSDP\nfsdp_config: &a {version: 2, ignored_modules: *a}\n",
    "merge keys": b"x: &x {fsdp_version: 2}\ndistributed_type: FSDP\nnum_processes: 2\n"
    b"fsdp_config: {<<: *x, fsdp_ofload_params: true, fsdp_use_orig_params: true}\n",
    "a merge of a list": b"distributed_type: FSDP\nfsdp_config: {<<: [1, 2]}\n",
    "duplicate keys": (V2 + "debug: false\ndebug: true\n").encode(),
    "a duplicate section": (V2 + "fsdp_config: {fsdp_version: 1}\n").encode(),
    "tabs": V2.replace("  ", "\t").encode(),
    "a byte order mark": b"\xef\xbb\xbf" + V2.encode(),
    "Latin-1": V2.encode() + "tpu_name: é\n".encode("latin-1"),
    "Windows' line ends": V2.replace("\n", "\r\n").encode(),
    "old Mac's line ends": V2.replace("\n", "\r").encode(),
    "nothing": b"",
    "two documents": (V2 + "---\n" + V2).encode(),
    "a list": b"- distributed_type: FSDP\n",
    "NaN and infinity": (V2 + "machine_rank: .nan\nmain_process_port: .inf\nnum_machines: -.inf\n").encode(),
    "a huge number": V2.replace("num_processes: 2", "num_processes: 1" + "0" * 4000).encode(),
    "a date": V2.encode() + b"main_process_ip: 2026-11-22\nmain_process_port: 2026-13-45\n",
    "a long sexagesimal": V2.replace("num_processes: 2", "num_processes: " + "1:" * 200_000 + "1").encode(),
    "keys that are no text": V2.encode() + b"1: a\nnull: b\ntrue: c\n2026-11-22: d\n",
    "keys that are lists": V2.encode() + b"? [a, b]\n: c\n",
    "tags": V2.encode() + b"tpu_env: !!python/object/apply:os.system [echo hi]\n",
    "control characters": V2.encode() + b"tpu_name: \"\\e[31m\\x00\"\n",
    "deep lists": b"gpu_ids: " + b"[" * 3000 + b"]" * 3000 + b"\n",
    "a path with a null": V2.encode() + b'deepspeed_config: {deepspeed_config_file: "\\0"}\n',
    "a long path": DDP.replace("MULTI_GPU", "DEEPSPEED").encode()
    + b"deepspeed_config: {deepspeed_config_file: " + b"a" * 5000 + b"}\n",
    "100 MB": b"# " + b"x" * 100_000_000 + b"\n" + V2.encode(),
    **{f"{section} is a list": f"distributed_type: FSDP\n{section}: [1, {{a: b}}]\n".encode() for section in SECTIONS},
    **{f"{section} is true": f"distributed_type: DEEPSPEED\n{section}: true\n".encode() for section in SECTIONS},
    **{f"{section} is a number": f"distributed_type: MULTI_GPU\n{section}: 1.5\n".encode() for section in SECTIONS},
}  # fmt: skip
SECONDS = 5


@pytest.mark.parametrize("name", ODD)
def test_an_odd_file_ends_well(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, start = tmp_path / "odd.yaml", time.process_time()
    path.write_bytes(ODD[name])
    for flag in ("--strict", "--fix", "--json"):
        codes: list[int] = []

        def check(words: tuple[str, ...] = ("check", flag, str(path)), codes: list[int] = codes) -> None:
            codes.append(cli.call(list(words)))

        ended = guard(check)
        assert (codes or [ended])[0] in (0, 1, 2)
    output = capsys.readouterr()
    assert "Traceback" not in output.err
    assert len(output.out) + len(output.err) < 100_000
    assert time.process_time() - start < SECONDS


@pytest.mark.parametrize("value", ["{}", "'{}'", "[1, {}]", "0x{}", "-{}", "{}.5"])
@pytest.mark.parametrize("name", ["odd.yaml", "odd.json"])
def test_a_number_of_thousands_of_digits_is_named(value: str, name: str, tmp_path: Path) -> None:
    """Python converts 4,300 at most, and the parsers don't say which number it was."""
    path, text = tmp_path / name, value.format("9" * 5000)
    path.write_text(
        f'{{\n"num_processes": {text}}}' if name.endswith("json") else f"debug: true\nnum_processes: {text}\n"
    )
    with pytest.raises(UsageError, match=rf"{path}:2: a number of more than 1,000 characters\n"):
        linter.lint(path, linter.LintOptions())


@pytest.mark.parametrize("place", ["/dev/zero", "pipe", "folder", "/dev/null"])
def test_what_is_no_file_ends_well(place: str, tmp_path: Path) -> None:
    path = tmp_path / place
    if place == "pipe":
        os.mkfifo(path)
    if place == "folder":
        path.mkdir()
    opened = len(os.listdir("/proc/self/fd"))
    with pytest.raises(UsageError):
        linter.lint(path, linter.LintOptions())
    assert len(os.listdir("/proc/self/fd")) == opened


@pytest.mark.parametrize("code", ["(" * 200_000, "x = " + "-" * 100_000 + "1", "x = 1" + " + 1" * 100_000])
def test_a_script_that_is_nested_too_deep_is_refused(code: str, tmp_path: Path) -> None:
    """Python's parser then says MemoryError or RecursionError."""
    (tmp_path / "fsdp.yaml").write_text(V2)
    (tmp_path / "script.py").write_text(code)
    with pytest.raises(UsageError, match=r"cannot read .*script\.py.*(too deep|too many|recursion)"):
        linter.lint(tmp_path / "fsdp.yaml", linter.LintOptions(script=tmp_path / "script.py"))


def test_a_json_file_must_be_json(tmp_path: Path) -> None:
    """Accelerate chooses the parser by the name."""
    path = tmp_path / "config.json"
    path.write_text(V2)
    with pytest.raises(UsageError, match="not JSON"):
        linter.lint(path, linter.LintOptions())


@pytest.mark.parametrize(
    ("version", "repaired"), [("2.0", 2), ("v2", 2), ("'2.0'", 2), ("1.0", 1), ("fsdp2", 2), ("3", 3), ("-1", -1)]
)
def test_an_odd_version_is_not_taken_for_fsdp1(version: str, repaired: int, tmp_path: Path) -> None:
    """With a resharding that is right under FSDP2 and none of FSDP1's business."""
    rest = "  fsdp_reshard_after_forward: false\n" if repaired != 1 else ""
    text = V2.replace("fsdp_version: 2", f"fsdp_version: {version}") + rest
    codes = {finding.code for finding in findings(text, tmp_path) if finding.severity == "error"}
    assert codes <= {"AF203", "AF204", "AF205"}
    assert codes
    findings(text, tmp_path, fix=True)
    section = yaml.safe_load((tmp_path / "checked.yaml").read_text())["fsdp_config"]
    assert section["fsdp_version"] == repaired
    assert section.get("fsdp_reshard_after_forward") is (False if rest else None)


def merged(first: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    both = {**first, **other}
    for key in first.keys() & other.keys():
        if isinstance(first[key], dict) and isinstance(other[key], dict):
            both[key] = {**first[key], **other[key]}
    return both


BAD = [yaml.safe_load(bad) for bad, _ in GOLDEN.values()]


@pytest.mark.slow
@settings(max_examples=60)
@given(parts=st.lists(st.sampled_from(BAD), min_size=1, max_size=3), indent=st.sampled_from([2, 4]), data=st.data())
def test_a_repair_never_makes_a_file_worse(parts: list[Any], indent: int, data: st.DataObject, tmp_path: Path) -> None:
    """No error that wasn't there, and every key that no finding names keeps its value, as PyYAML reads it.

    What stood beside another engine or wrap policy, and was read by nobody, has the errors that it has under the one
    that is meant.
    """
    content: dict[str, Any] = {}
    for part in parts:
        content = merged(content, part)
    path = tmp_path / "bad.yaml"
    path.write_text(
        yaml.safe_dump(content, indent=indent, default_flow_style=data.draw(st.sampled_from([False, None])))
    )
    before = linter.lint(path, linter.LintOptions())
    after = linter.lint(path, linter.LintOptions(fix=True))
    now = yaml.safe_load(path.read_text())
    meant = tmp_path / "meant.yaml"
    section, policy = now.get("fsdp_config"), "fsdp_auto_wrap_policy"
    chosen: dict[str, Any] = {key: now[key] for key in ("distributed_type",) if key in now}
    if isinstance(section, dict) and policy in section:
        chosen["fsdp_config"] = {policy: section[policy]}
    meant.write_text(yaml.safe_dump(merged(content, chosen)))
    hidden = linter.lint(meant, linter.LintOptions())
    edits = [edit for finding in (*before, *hidden) for edit in finding.edits]
    named = {edit.key for edit in edits} | {edit.new_key for edit in edits}
    errors = [
        {finding.code for finding in group if finding.severity == "error"} for group in ([*before, *hidden], after)
    ]
    assert errors[1] - errors[0] == set(), content
    for key, value in content.items():
        if key not in named and not isinstance(value, dict):
            assert now[key] == value
        for inner, finding in value.items() if isinstance(value, dict) and isinstance(now.get(key), dict) else ():
            if inner not in named and f"fsdp_{inner}" not in named and inner in now[key]:
                assert now[key][inner] == finding


@pytest.mark.parametrize("kind", ["FSDP", "MULTI_GPU"])
def test_use_cpu_hides_nothing(kind: str) -> None:
    """It doesn't reach the ranks, so they meet on one GPU all the same."""
    text = GOLDEN["AF413"][0].replace("type: FSDP", f"type: {kind}") + "use_cpu: true\n"
    assert {"AF405", "AF413"} <= codes_of(subject(text))


def ended(*words: str | Path) -> int:
    """The exit code of a command, run in this process."""
    return cli.call([str(word) for word in words])


def test_launch_lints_the_scripts_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And launches all the same if it is told to; what train/sft.py mends is no reason to refuse it."""
    path, script = tmp_path / "fsdp.yaml", tmp_path / "train.py"
    path.write_text(V2)
    script.write_text("print()\n")
    assert ended("launch", "--dry-run", path, script, "--optim", "adafactor") == 1
    output = capsys.readouterr()
    assert "AF604" in output.err
    assert "--no-check" in output.err
    assert "accelerate launch" not in output.out
    assert ended("launch", "--dry-run", "--no-check", path, script, "--optim", "adafactor") == 0
    output = capsys.readouterr()
    assert "AF604" in output.err
    assert "AF604" not in output.out
    assert "--optim adafactor" in output.out
    smooth = ("--label_smoothing_factor", "0.1")
    assert ended("launch", "--dry-run", path, script, *smooth) == 1
    assert "AF630" in capsys.readouterr().err
    assert ended("launch", "--dry-run", path, SFT, *smooth) == 0
    with pytest.raises(UsageError, match="--no-check after SCRIPT"):
        ended("launch", path, script, "--no-check")


@pytest.mark.parametrize(
    ("text", "warned"),
    [
        ("trainer.train()\ntrainer.save_model()\n", True),
        ("from accel_fsdp.training import SftTrainer\ntrainer.save_model()\n", False),
        ("#!/bin/sh\nexec python train.py # trainer.save_model()\n", False),
        ("trainer.save_model()\0\n", False),
    ],
)
def test_launch_warns_of_what_it_sees_in_the_script(
    text: str, warned: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And launches it: a warning is none to stop at, nor is a script that isn't Python."""
    path, script = tmp_path / "fsdp.yaml", tmp_path / "train.py"
    path.write_text(V2)
    script.write_text(text)
    assert ended("launch", "--dry-run", path, script) == 0
    output = capsys.readouterr()
    assert ("warning AF901: train.py:" in output.err) == warned
    assert "launched" not in output.err
    assert f"accelerate launch --config_file {path} {script}\n" in output.out
