"""`accel-fsdp migrate --to native`, and back: transformers' own `DistributedConfig` judges the JSON."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from checking import V2
from conftest import accel_fsdp
from meaning import meaning
from transformers.distributed import DistributedConfig

from accel_fsdp import linter
from accel_fsdp.config import expert_refusal

EIGHT = V2.replace("num_processes: 2", "num_processes: 8").replace("'no'", "bf16")
MESH = """\
parallelism_config:
  parallelism_config_dp_replicate_size: 2
  parallelism_config_dp_shard_size: 2
  parallelism_config_tp_size: 2
"""
OURS = "# Launch:\n#   accelerate launch --config_file THIS_FILE train/sft.py --expert_parallel_size 4\n"


def to_native(folder: Path, text: str, *words: str, code: int = 0) -> tuple[DistributedConfig, str]:
    """The JSON as transformers reads it, and what the command said."""
    (folder / "job.yaml").write_text(text)
    finished = accel_fsdp("migrate", folder / "job.yaml", "--to", "native", "-o", folder / "native.json", *words)
    assert finished.code == code, finished.output
    assert (folder / "job.yaml").read_text() == text
    content = json.loads((folder / "native.json").read_text()) if code == 0 else {}
    return DistributedConfig(**content), finished.output


def to_yaml(folder: Path, code: int = 0, *words: str, **content: Any) -> tuple[dict[str, Any], str]:
    (folder / "native.json").write_text(json.dumps(content))
    finished = accel_fsdp("migrate", folder / "native.json", "--to", "fsdp2", "-o", folder / "back.yaml", *words)
    assert finished.code == code, finished.output
    return (yaml.safe_load((folder / "back.yaml").read_text()) if code == 0 else {}), finished.output


def sizes(config: DistributedConfig) -> tuple[int | None, ...]:
    return config.dp_replicate_size, config.fsdp_size, config.tp_size, config.ep_size


def test_a_plain_file_shards_over_all_ranks(tmp_path: Path) -> None:
    config, output = to_native(tmp_path, EIGHT)
    assert sizes(config) == (1, 8, 1, 1)
    assert config.fsdp_mixed_precision
    assert not config.fsdp_cpu_offload
    for lost in ("float32", "dtype", "own plan", "torchrun", "num_processes"):
        assert lost in output


def test_a_mesh_and_offload_are_kept(tmp_path: Path) -> None:
    config, _ = to_native(tmp_path, EIGHT + "  fsdp_offload_params: true\n" + MESH)
    assert sizes(config) == (2, 2, 2, 1)
    assert config.fsdp_cpu_offload


@pytest.mark.parametrize(("text", "words"), [(EIGHT, ("--expert-parallel-size", "4")), (OURS + EIGHT, ())])
def test_experts_come_from_the_flag_or_the_launch_line(text: str, words: tuple[str, ...], tmp_path: Path) -> None:
    config, _ = to_native(tmp_path, text, *words)
    assert sizes(config) == (1, 8, 1, 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (EIGHT + "  fsdp_activation_checkpointing: true\n", "--gradient_checkpointing true"),
        (EIGHT + "  fsdp_reshard_after_forward: false\n", "keep_full_weight"),
        (EIGHT + "  fsdp_ignored_modules: lm_head\n", "fsdp_ignored_modules"),
        (EIGHT.replace("bf16", "fp16"), "only bfloat16"),
        (EIGHT + MESH.replace("tp_size", "cp_size"), "cp_size"),
        (EIGHT + "dynamo_config: {dynamo_backend: INDUCTOR}\n", "--torch_compile true"),
        (
            EIGHT + MESH.replace("shard_size: 2", "shard_size: 1").replace("replicate_size: 2", "replicate_size: 1"),
            "--bf16",
        ),
    ],
)
def test_what_native_cannot_say_needs_force(text: str, message: str, tmp_path: Path) -> None:
    _, output = to_native(tmp_path, text, code=1)
    assert message in " ".join(output.split())
    assert not (tmp_path / "native.json").exists()
    to_native(tmp_path, text, "--force")


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        (EIGHT, ("--expert-parallel-size", "3"), "divide"),
        (EIGHT + MESH, ("--expert-parallel-size", "3"), "multiple"),
        (EIGHT.replace("num_processes: 8", ""), (), "num_processes"),
        (EIGHT.replace("version: 2", "version: 1"), (), "--to fsdp2"),
        ("distributed_type: MULTI_GPU\nnum_processes: 2\n", (), "--to fsdp2"),
    ],
)
def test_what_has_no_native_form_is_refused(text: str, words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    _, output = to_native(tmp_path, text, *words, code=2)
    assert message in output


def test_the_yaml_is_never_overwritten_by_json(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(EIGHT)
    finished = accel_fsdp("migrate", tmp_path / "job.yaml", "--to", "native")
    assert (finished.code, "-o" in finished.output) == (2, True)
    shown = accel_fsdp("migrate", tmp_path / "job.yaml", "--to", "native", "--dry-run", "--json")
    assert json.loads(json.loads(shown.output.partition("\n")[2])["native"])["fsdp_size"] == 8


def test_experts_are_refused_where_transformers_refuses_them() -> None:
    for shards, tensor, experts in product((1, 2, 3, 4, 6), (1, 2, 3, 4), range(1, 9)):
        sizes = {"dp_replicate_size": 1, "fsdp_size": shards, "tp_size": tensor, "ep_size": experts}
        refused = ""
        try:
            DistributedConfig(**sizes)
        except ValueError as error:
            refused = str(error)
        assert bool(expert_refusal(sizes)) == bool(refused), sizes


def test_a_native_file_becomes_a_yaml_that_passes(tmp_path: Path) -> None:
    _, output = to_yaml(tmp_path, fsdp_size=8, fsdp_mixed_precision=True, fsdp_cpu_offload=True)
    means = meaning(tmp_path / "back.yaml")
    assert (means["engine"], means["processes"], means["precision"], means["offload"]) == ("fsdp2", 8, "bf16", True)
    assert means["strategy"] == "FULL_SHARD"
    assert "bfloat16" in output
    findings = linter.lint(tmp_path / "back.yaml", linter.LintOptions(strict=True))
    assert [finding.code for finding in findings if finding.severity == "error"] == []


def test_accelerate_reads_the_precision_of_a_native_file_as_text(tmp_path: Path) -> None:
    """A bare no would be false: accelerate launch stops, as 'bool' object has no attribute 'lower'."""
    to_yaml(tmp_path, fsdp_size=2, tp_size=2)
    assert load_config_from_file(str(tmp_path / "back.yaml")).mixed_precision == "no"


def test_experts_go_to_the_launch_line(tmp_path: Path) -> None:
    content, output = to_yaml(tmp_path, fsdp_size=2, tp_size=2, ep_size=4)
    assert content["parallelism_config"]["parallelism_config_tp_size"] == 2
    assert "--expert_parallel_size 4" in (tmp_path / "back.yaml").read_text()
    assert "--expert_parallel_size" in output


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("experts", [1, 4])
@pytest.mark.parametrize("on", [False, True])
@pytest.mark.parametrize("copies", [1, 2])
def test_there_and_back_is_the_same(copies: int, on: bool, experts: int, tensor: int, tmp_path: Path) -> None:
    content = {"dp_replicate_size": copies, "fsdp_size": 4, "tp_size": tensor, "ep_size": experts}
    content |= {"fsdp_cpu_offload": on, "fsdp_mixed_precision": not on}
    to_yaml(tmp_path, **content)
    config, _ = to_native(tmp_path, (tmp_path / "back.yaml").read_text(), "--overwrite")
    assert config == DistributedConfig(**content)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"tp_size": 2, "pp_size": 2}, "pp_size"),
        ({"tp_size": 2, "tp_plan": {}}, "tp_plan"),
        ({"fsdp_size": 2, "fsdp_plan": {"model.layers.*": "keep_full_weight"}}, "fsdp_plan"),
        ({"fsdp_size": 2, "ep_size": 2, "ep_implementation": "all_to_all"}, "ep_implementation"),
    ],
)
def test_what_a_yaml_cannot_say_needs_force(content: dict[str, Any], message: str, tmp_path: Path) -> None:
    _, output = to_yaml(tmp_path, 1, **content)
    assert message in output
    to_yaml(tmp_path, 0, "--force", **content)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"fsdp_size": 2, "fsdp_sizes": 3}, "fsdp_sizes"),
        ({"fsdp_size": "two"}, "two"),
        ({"fsdp_size": 0}, "fsdp_size: 0"),
        ({"fsdp_size": 4, "ep_size": 3}, "ep_size"),
        ({"tp_plan": "auto"}, "tp_size"),
    ],
)
def test_a_native_file_that_transformers_refuses_is_refused(
    content: dict[str, Any], message: str, tmp_path: Path
) -> None:
    _, output = to_yaml(tmp_path, 2, **content)
    assert message in output


def test_a_native_file_goes_to_fsdp2_only(tmp_path: Path) -> None:
    (tmp_path / "native.json").write_text('{"fsdp_size": 2, "tp_size": 2}')
    finished = accel_fsdp("migrate", tmp_path / "native.json", "--to", "zero3", "--dry-run")
    assert (finished.code, "--to fsdp2" in finished.output) == (2, True)
    assert accel_fsdp("check", tmp_path / "native.json").output.count("error") == 2  # the finding and the summary
