"""Tensor and expert parallelism: what the planner says a rank holds, against real ranks on transformers' own meshes."""

import json
from pathlib import Path

import axes
import pytest
import yaml

from accel_fsdp import cli
from accel_fsdp.config import JobConfig
from accel_fsdp.errors import UsageError
from accel_fsdp.job import from_yaml
from accel_fsdp.prediction import trace_store


@pytest.mark.slow
def test_each_rank_holds_what_is_predicted(tmp_path: Path) -> None:
    seen = axes.held(2, tmp_path)
    assert len([mesh for kind in seen.values() for mesh in kind]) == 8
    for kind, by_mesh in seen.items():
        for mesh, held in by_mesh.items():
            assert axes.resting(kind, mesh) == held, (kind, mesh)


@pytest.mark.slow
def test_the_highest_point_is_where_a_real_step_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    asked = list(axes.settings(["llama"], ["tp 2 x fsdp 2"]))
    asked += axes.settings(["tied"], ["tp 2", "tp 2 x fsdp 2"])
    asked += axes.settings(["mixtral"], ["tp 2 x fsdp 2, ep 4"])
    for setting, real in zip(asked, axes.measured(asked, tmp_path), strict=True):
        prediction = axes.predicted(setting)
        assert (prediction["parameters"], prediction["gradients"]) == (real["parameters"], real["gradients"])
        assert abs(prediction["peak"] / real["peak"] - 1) <= 0.025, (
            setting["model"],
            setting["name"],
            prediction,
            real,
        )


def mesh_of(shards_: int, tensor: int, copies: int = 1, **other: int) -> JobConfig:
    sizes = {"dp_replicate": copies, "dp_shard": shards_, "tp": tensor, **other}
    section = {f"parallelism_config_{axis}_size": size for axis, size in sizes.items()}
    fsdp = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    content = {"distributed_type": "FSDP", "num_processes": 8, "mixed_precision": "bf16", "fsdp_config": fsdp}
    return JobConfig({**content, "parallelism_config": section})


def test_yaml_and_arguments_say_the_axes() -> None:
    layout = from_yaml.predictable(mesh_of(4, 2), {"expert_parallel_size": "8"}).layout
    assert (layout.tensor, layout.experts, layout.shard_ranks, layout.expert_shard_ranks) == (2, 8, 4, 1)
    assert (layout.data_ranks, layout.replicas, layout.name) == (4, 1, "FSDP2 FULL_SHARD, tp 2, ep 8")
    hybrid = from_yaml.predictable(mesh_of(2, 2, copies=2)).layout
    assert (hybrid.name, hybrid.shard_ranks, hybrid.replicas) == ("FSDP2 HYBRID_SHARD, tp 2", 2, 2)


@pytest.mark.parametrize(
    ("config", "experts", "what"),
    [
        (mesh_of(4, 2), 6, "expert_parallel_size 6 can't"),
        (mesh_of(2, 2, copies=2), 8, "expert_parallel_size 8 can't"),
        (mesh_of(2, 2), 1, "a mesh of 1 x 2 x 2 on 8 processes"),
        (mesh_of(2, 2, cp=2), 1, "cp_size: 2 with tp_size: 2 can't be predicted"),
        (mesh_of(4, 1, sp=2), 1, "sp_size: 2 can't be predicted"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(config: JobConfig, experts: int, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        from_yaml.predictable(config, {"expert_parallel_size": experts})


@pytest.mark.parametrize(
    ("model", "tensor", "experts", "what"),
    [
        ("HuggingFaceTB/SmolLM2-135M", 2, 1, "tp 2 doesn't divide the model's 9 attention heads"),
        ("Qwen/Qwen3-30B-A3B", 8, 1, "tp 8 doesn't divide the model's 4 key/value heads"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", 1, 16, "ep 16 doesn't divide the model's 8 experts"),
        ("openai-community/gpt2", 2, 1, "tp 2: transformers has no plan to divide the layers of this model"),
        ("Qwen/Qwen3-8B", 1, 2, "ep 2: transformers has no plan to divide the experts of this model"),
        ("Qwen/Qwen3-30B-A3B", 4, 8, ""),
    ],
)
def test_what_ranks_can_not_divide_is_refused_with_the_numbers(
    model: str, tensor: int, experts: int, what: str
) -> None:
    shape, _ = trace_store.find(model) or pytest.fail("not bundled")
    misfits = list(shape.division.misfits({"fsdp": 1, "tp": tensor, "ep": experts}))
    assert next((misfit.what for misfit in misfits), "") == what
    assert all(misfit.why for misfit in misfits)


def test_a_plan_refuses_them_and_predicts_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, arguments = tmp_path / "fsdp.yaml", tmp_path / "args.yaml"
    config.write_text(yaml.safe_dump({**mesh_of(4, 2).values, "num_machines": 1}))
    arguments.write_text("bf16: true\nmax_length: 512\nper_device_train_batch_size: 1\npacking: true\n")
    words = ["plan", "--config", str(config), "--args", str(arguments), "--gpus", "8xH100-80GB", "--json", "--model"]
    with pytest.raises(UsageError, match="tp 2 doesn't divide the model's 9 attention heads"):
        cli.call([*words, "HuggingFaceTB/SmolLM2-135M"])
    assert cli.call([*words, "Qwen/Qwen3-0.6B"]) == 0
    report = json.loads(capsys.readouterr().out)
    [row] = report["strategies"]
    assert (row["strategy"], row["tensor_parallel"]) == ("FSDP2 FULL_SHARD, tp 2", 2)
    assert row["peak_bytes"] > 0
    assert {row[name] for name in ("step_seconds", "tokens_per_s_per_gpu", "mfu", "bound", "sent_bytes")} == {None}
    assert report["cost"] is None
    arguments.write_text("bf16: true\nmax_length: 512\nper_device_train_batch_size: 1\nuse_peft: true\n")
    with pytest.raises(UsageError, match="an adapter with tp 2"):  # as train/sft.py does
        cli.call([*words, "Qwen/Qwen3-0.6B"])
