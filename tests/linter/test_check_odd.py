"""Odd files and the linter: it ends soon, without a traceback; one finding hides no other; repairs make nothing worse.

What a parser can't take is in `config/test_yaml_checks.py`.
"""

import json
import os
import time
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import yaml
from checking import DDP, LLAMA, V2, codes_of, finding, findings, subject
from conftest import here
from hypothesis import given, settings
from hypothesis import strategies as st
from test_check import BAD

from accel_fsdp import linter
from accel_fsdp.errors import UsageError

SECTIONS = ("fsdp_config", "parallelism_config", "deepspeed_config", "dynamo_config", "fp8_config", "gpu_ids")
ODD: dict[str, bytes] = {
    "merge keys": b"x: &x {fsdp_version: 2}\ndistributed_type: FSDP\nnum_processes: 2\n"
    b"fsdp_config: {<<: *x, fsdp_ofload_params: true, fsdp_use_orig_params: true}\n",
    "a merge of a list": b"distributed_type: FSDP\nfsdp_config: {<<: [1, 2]}\n",
    "tabs": V2.replace("  ", "\t").encode(),
    "a byte order mark": b"\xef\xbb\xbf" + V2.encode(),
    "Latin-1": V2.encode() + "tpu_name: é\n".encode("latin-1"),
    "Windows' line ends": V2.replace("\n", "\r\n").encode(),
    "old Mac's line ends": V2.replace("\n", "\r").encode(),
    "two documents": (V2 + "---\n" + V2).encode(),
    "NaN and infinity": (V2 + "machine_rank: .nan\nmain_process_port: .inf\nnum_machines: -.inf\n").encode(),
    "a long sexagesimal": V2.replace("num_processes: 2", "num_processes: " + "1:" * 200_000 + "1").encode(),
    "keys that are no text": V2.encode() + b"1: a\nnull: b\ntrue: c\n2026-11-22: d\n",
    "keys that are lists": V2.encode() + b"? [a, b]\n: c\n",
    "tags": V2.encode() + b"tpu_env: !!python/object/apply:os.system [echo hi]\n",
    "control characters": V2.encode() + b"tpu_name: \"\\e[31m\\x00\"\n",
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
def test_an_odd_file_ends_well(name: str, tmp_path: Path) -> None:
    path, start = tmp_path / "odd.yaml", time.process_time()
    path.write_bytes(ODD[name])
    for flag in ("--strict", "--fix", "--json"):
        finished = here("check", flag, path)
        assert finished.code in (0, 1, 2)
        assert "Traceback" not in finished.output
        assert len(finished.output) < 30_000
    assert time.process_time() - start < SECONDS


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


def merged(first: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    both = {**first, **other}
    for key in first.keys() & other.keys():
        if isinstance(first[key], dict) and isinstance(other[key], dict):
            both[key] = {**first[key], **other[key]}
    return both


FAULTS = [yaml.safe_load(text) for text in BAD.values()]


@pytest.mark.slow
@settings(max_examples=60)
@given(
    parts=st.lists(st.sampled_from(FAULTS), min_size=1, max_size=3),
    indent=st.sampled_from([2, 4]),
    flow=st.sampled_from([False, None]),
)
def test_a_repair_never_makes_a_file_worse(parts: list[Any], indent: int, flow: bool | None, tmp_path: Path) -> None:
    """No error that wasn't there, and every key that no finding names keeps its value, as PyYAML reads it.

    What stood beside another engine or wrap policy, and was read by nobody, has the errors that it has under the one
    that is meant.
    """
    content: dict[str, Any] = reduce(merged, parts, {})
    text = yaml.safe_dump(content, indent=indent, default_flow_style=flow)
    before, after = findings(text, tmp_path), findings(text, tmp_path, fix=True)
    now = yaml.safe_load((tmp_path / "checked.yaml").read_text())
    section, policy = now.get("fsdp_config"), "fsdp_auto_wrap_policy"
    chosen: dict[str, Any] = {key: now[key] for key in ("distributed_type",) if key in now}
    if isinstance(section, dict) and policy in section:
        chosen["fsdp_config"] = {policy: section[policy]}
    before += findings(yaml.safe_dump(merged(content, chosen)), tmp_path)
    named = {key for found in before for edit in found.edits for key in (edit.key, edit.new_key)}
    errors, left = ({found.code for found in group if found.severity == "error"} for group in (before, after))
    assert left <= errors, content
    for key, value in content.items():
        if key not in named and not isinstance(value, dict):
            assert now[key] == value
        for inner, setting in value.items() if isinstance(value, dict) and isinstance(now.get(key), dict) else ():
            if inner not in named and f"fsdp_{inner}" not in named and inner in now[key]:
                assert now[key][inner] == setting


INSIDE = "  fsdp_offload_params: maybe\n  fsdp_state_dict_type: LOCAL_STATE_DICT\n"


@pytest.mark.parametrize("kind", ["", "distributed_type: fsdp\n", "distributed_tpye: FSDP\n"])
def test_without_an_engine_the_rest_is_checked_all_the_same(kind: str) -> None:
    text = V2.replace("distributed_type: FSDP\n", kind) + INSIDE
    assert codes_of(subject(V2 + INSIDE)) | {"AF501"} <= codes_of(subject(text, model=LLAMA)) | {"AF501"}
    assert codes_of(subject(text)) - codes_of(subject(V2 + INSIDE)) <= {"AF101", "AF102", "AF203"}


def test_a_key_that_stands_twice_hides_nothing(tmp_path: Path) -> None:
    text = V2 + INSIDE + "debug: false\n  # why\ndebug: true\nfsdp_ofload: 1\n"
    twice = finding("AF111", text, tmp_path)
    assert (twice.key, twice.line) == ("debug", text.splitlines().index("debug: true") + 1)
    listed = json.loads(here("check", "--json", tmp_path / "checked.yaml").printed)
    assert {row["code"] for row in listed} >= codes_of(subject(V2 + INSIDE)) | {"AF102", "AF111"}
    assert not any(row["fixable"] for row in listed)
    assert here("check", "--fix", tmp_path / "checked.yaml").code == 1
    assert (tmp_path / "checked.yaml").read_text() == text
    assert finding("AF111", V2 + "  fsdp_version: 1\n", tmp_path).key == "fsdp_config.fsdp_version"


@pytest.mark.parametrize(
    ("tool", "text"),
    [
        ("Axolotl", "base_model: m\nsequence_len: 8192\nfsdp: [full_shard]\nfsdp_config: {fsdp_offload_params: no}\n"),
        ("LLaMA-Factory", "model_name_or_path: m\nstage: sft\nfinetuning_type: full\ntemplate: llama3\n"),
        ("a training script", "model_name_or_path: m\ndataset_name: d\nlearning_rate: 1.0e-5\noutput_dir: out\n"),
        ("a training script", '{"fsdp": "full_shard auto_wrap", "fsdp_config": {"min_num_params": 2000}}'),
        ("SageMaker", "compute_environment: AMAZON_SAGEMAKER\ndistributed_type: NO\nec2_instance_type: p\n"),
    ],
)
def test_a_file_of_another_tool_is_named_and_left_alone(text: str, tool: str, tmp_path: Path) -> None:
    (found,) = findings(text, tmp_path, fix=True)
    assert (found.code, found.severity) == ("AF112", "error")
    assert f"a configuration of {tool}," in found.what
    assert (tmp_path / "checked.yaml").read_text() == text
    edited = here("config", "--yes", "--from", tmp_path / "checked.yaml", "--model", "gpt2")
    assert (edited.code, f"a configuration of {tool}" in edited.text) == (2, True)


def test_a_key_without_its_prefix_is_named_as_the_file_writes_it(tmp_path: Path) -> None:
    text = V2 + "  zzz: 1\n  ofload_params: true\n  fsdp_yyy: 1\n"
    unread = [found for found in findings(text, tmp_path) if found.code == "AF103"]
    assert [(found.line, found.what, found.fix) for found in unread] == [
        (8, "nothing reads zzz.", "remove zzz"),
        (9, "nothing reads ofload_params. Did you mean fsdp_offload_params?", "rename it to fsdp_offload_params"),
        (10, "nothing reads fsdp_yyy.", "remove fsdp_yyy"),
    ]
