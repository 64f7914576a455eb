"""Whether a mesh divides a model: `check`, `plan`, `config` and `train/sft.py` say the same of each family.

What real ranks do with such meshes is in `linter/test_upstream_ranks.py` and `test_trained_meshes.py`.
"""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from conftest import here
from peft.tuners.lora import LoraLayer
from test_trained_meshes import EXPERTS, KINDS, PACKED, SMALL
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from accel_fsdp.config import EXPERT_FLAG, JobConfig
from accel_fsdp.errors import UserError
from accel_fsdp.job import Layout, Recipe, from_yaml
from accel_fsdp.linter import rules
from accel_fsdp.models import build, model_facts
from accel_fsdp.prediction import written
from accel_fsdp.prediction.memory import Variant, shards
from accel_fsdp.prediction.tracing.model_shape import shape_of
from accel_fsdp.prediction.tracing.recorder import Recorder
from accel_fsdp.training import load_model, mesh
from accel_fsdp.training.arguments import ModelArguments

OLMO = {"olmo2": {}}
"""A family whose plan gathers what its attention computes with, and divides its other layers."""
MESHES: dict[str, tuple[dict[str, int], int]] = {
    "tp 2": ({"dp_shard": 1, "tp": 2}, 1),
    "tp 8": ({"dp_shard": 1, "tp": 8}, 1),
    "fsdp 4 x tp 2": ({"dp_shard": 4, "tp": 2}, 1),
    "copies 2 x tp 2": ({"dp_replicate": 2, "dp_shard": 1, "tp": 2}, 1),
    "fsdp 8 x ep 2": ({}, 2),
    "fsdp 8 x ep 8": ({}, 8),
    "fsdp 4 x tp 2 x ep 4": ({"dp_shard": 4, "tp": 2}, 4),
}
REFUSED = {
    "llama": {"tp 8": "4 key/value heads", "ep": "no plan to divide the experts"},
    "qwen3": {"tp 8": "4 key/value heads", "ep": "no plan to divide the experts"},
    "gemma3_text": {"tp 8": "4 key/value heads", "ep": "no plan to divide the experts"},
    "phi3": {"ep": "no plan to divide the experts"},
    "olmo2": {"ep": "no plan to divide the experts"},
    "qwen3_moe": {"tp 8": "4 key/value heads", "ep 8": "4 experts"},
    "mixtral": {"tp 8": "4 key/value heads", "ep 8": "4 experts"},
    "gpt_oss": {"tp": "no plan to divide the layers", "ep 8": "4 experts"},
}
"""What is said of a family on each mesh with such an axis."""


def file_for(sizes: dict[str, int]) -> JobConfig:
    ranks = 8 if not sizes else 2 * sizes.get("dp_shard", 1) * sizes.get("dp_replicate", 1)
    ranks = max(ranks, sizes.get("tp", 1))
    section = {f"parallelism_config_{axis}_size": size for axis, size in sizes.items()}
    fsdp = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    content = {"distributed_type": "FSDP", "num_processes": ranks, "mixed_precision": "bf16", "fsdp_config": fsdp}
    return JobConfig({**content, **({"parallelism_config": section} if sizes else {})})


def refusals_by_check(file: JobConfig, experts: int, config: Any) -> list[str]:
    arguments = {"expert_parallel_size": experts}
    subject = rules.Subject(file.values, args=arguments, model=model_facts("a", config), uses_sft=True)
    asked = {code: rules.engine.RULES[code] for code in ("AF516", "AF517", "AF518")}
    return [finding.what for finding in rules.engine.run(subject, asked)]


def refusal_by_plan(file: JobConfig, experts: int, config: Any) -> str:
    shape = shape_of("a", config, build("a", config))
    job = from_yaml.predictable(file, {"expert_parallel_size": experts})
    try:
        written.problem_of(
            *(file, job, "a", f"{job.layout.ranks}xH100-80GB"),
            *(lambda name, recipe: (shape, SimpleNamespace(config={})), True),
        )
    except UserError as error:
        return error.what
    return ""


def refusal_by_training(file: JobConfig, experts: int, config: Any) -> str:
    try:
        mesh.check_on(replace(from_yaml.layout_of(file), experts=experts), config, "full")
    except UserError as error:
        return error.what
    return ""


def skip_packed(kind: str, name: str) -> None:
    if not PACKED and "tp" in name and KINDS.get(kind) is EXPERTS:
        pytest.skip("training refuses it with this torch")


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("kind", [*KINDS, *OLMO])
def test_all_say_the_same(kind: str, name: str) -> None:
    skip_packed(kind, name)
    config = AutoConfig.for_model(kind, **SMALL, **{**KINDS, **OLMO}[kind])
    expected = next((what for axis, what in REFUSED[kind].items() if axis in name), "")
    check_all(*MESHES[name], config, expected)


def check_all(sizes: dict[str, int], experts: int, config: Any, expected: str) -> None:
    file = file_for(sizes)
    refusal = refusal_by_training(file, experts, config)
    assert (expected in refusal, bool(refusal)) == (True, bool(expected))
    assert refusals_by_check(file, experts, config)[:1] == [refusal] * bool(refusal)
    assert refusal_by_plan(file, experts, config) == refusal


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "qwen2_moe", "gpt_oss", "deepseek_v3", "llama"])
def test_the_default_adapter_is_on_linear_layers_alone_and_the_plan_counts_it(kind: str) -> None:
    """PEFT's all-linear takes fused experts in, and then refuses train/sft.py's dropout.

    DeepSeek's shared experts and dense layers have names of experts, and get none.
    """
    config = small_config(kind)
    model = AutoModelForCausalLM.from_config(config)
    attention = [name for name, part in model.named_modules() if "attn" in name and isinstance(part, nn.Linear)]
    adapted = load_model.with_adapter(model, ModelArguments(model_name_or_path="a", use_peft=True))
    layers = {name.rpartition(".")[2] for name, part in adapted.named_modules() if isinstance(part, LoraLayer)}
    assert {name.rpartition(".")[2] for name in attention} <= layers
    assert ("gate_proj" in layers) == (kind in ("llama", "qwen2_moe"))
    assert "experts" not in layers
    trained = {name: weight.numel() for name, weight in adapted.named_parameters() if weight.requires_grad}
    recipe, variant = Recipe("lora", lora_rank=16), Variant.of("bf16-amp-lora-sdpa")
    units = shards.all_units(shape_of(kind, config, build(kind, config)), recipe, Layout.alone())
    planned = [unit.count * math.prod(p.shape) for unit in units for p in unit.parameters if p.trained]
    assert sum(planned) == sum(trained.values())
    recorder = Recorder(kind, config, variant)
    for block in recorder.shape.blocks:
        names = {name for name, _ in recorder._layer(block.layers[0], 16).named_parameters() if "lora" in name}
        place = f".layers.{block.layers[0]}."
        assert names == {name.partition(place)[2] for name in trained if place in name}


def small_config(kind: str) -> Any:
    sizes = {**SMALL, **EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    return AutoConfig.for_model(kind, **(SMALL if kind == "llama" else sizes))


@pytest.mark.parametrize(
    ("kind", "targets", "named"),
    [
        ("mixtral", "q_proj w1 w2 w3", "w1, w2, w3"),
        ("qwen3_moe", "experts.0.down_proj", "experts.0.down_proj"),
        ("gpt_oss", "q_proj mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj"),
        ("qwen2_moe", "q_proj down_proj", ""),
        ("qwen3_moe", "all-linear", ""),
    ],
)
def test_check_and_training_refuse_an_adapter_on_divided_experts(
    kind: str, targets: str, named: str, tmp_path: Path
) -> None:
    config, file = AutoConfig.for_model(kind, **SMALL, **EXPERTS), tmp_path / "fsdp2.yaml"
    config.save_pretrained(tmp_path)
    file.write_text(yaml.safe_dump(dict(file_for({}).values)))
    words = f"{EXPERT_FLAG} 2 --use_peft --lora_target_modules {targets}"
    (tmp_path / "line").write_text(f"train/sft.py --model_name_or_path {tmp_path} {words}")
    checked = here("check", file, "--args", tmp_path / "line").output
    refused = ""
    try:
        mesh.check_on(replace(from_yaml.layout_of(file_for({})), experts=2), config, "lora", targets.split())
    except UserError as error:
        refused = f"AF519: {error.what}\n  why: train/sft.py stops\n  fix: {error.fix}\n"
    assert f"on the experts ({named}) with ep 2" in refused or refused == named
    assert refused in checked
    assert ("AF519" in checked) == bool(named)
