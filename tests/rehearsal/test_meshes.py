"""Rehearsals of tensor and expert parallelism: real meshes on two and four ranks, and how they are scaled."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SFT, accel_fsdp
from rehearsals import FSDP2, rehearsed, yaml_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from accel_fsdp.config import JobConfig
from accel_fsdp.errors import UsageError
from accel_fsdp.models import parallel_plans, read_config
from accel_fsdp.models.shrink import shrink
from accel_fsdp.rehearsal import scaled

SIZES = {
    **{"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 8},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 256},
    **{"pad_token_id": 0, "eos_token_id": 2, "bos_token_id": 1},
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
KINDS = {"qwen3": {}, "qwen3_moe": EXPERTS}
UNPATCHED = """
import runpy
from accel_fsdp.training import patches

patches.fix_tensor_parallelism = lambda: None
runpy.run_path({!r}, run_name="__main__")
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for kind, more in KINDS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **more), dtype=torch.float32)
        model.save_pretrained(folder / kind)
        AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder / kind)
    return folder


def mesh(**sizes: int) -> dict[str, int]:
    return {f"parallelism_config_{axis}_size": size for axis, size in sizes.items()}


def mesh_file(folder: Path, precision: str, **sizes: int) -> Path:
    fsdp = {key: value for key, value in FSDP2.items() if key != "fsdp_transformer_layer_cls_to_wrap"}
    more: dict[str, Any] = {"parallelism_config": mesh(**sizes)} if sizes else {}
    return yaml_file(folder, fsdp, mixed_precision=precision, **more)


def proven(changes: list[str], *words: str | Path) -> dict[str, str]:
    """What the steps of a rehearsal say, of which all passed and gradients were repeated."""
    finished = accel_fsdp("rehearse", *words)
    report: dict[str, Any] = json.loads(finished.output[finished.output.index("{\n") :])
    assert finished.code == 0, finished.output
    assert report["changes"][:2] == changes
    sentences = {step["name"]: step["said"] for step in report["steps"]}
    for sentence in sentences.values():
        assert "not repeated" not in sentence, sentence
    assert "gradients and weights of the first 2 steps are those of one process" in sentences["resume after SIGKILL"]
    assert "losses of steps 3 to 4 are those of one process" in sentences["resume on 1 rank"]
    return sentences


@pytest.mark.slow
def test_shards_of_tensor_parallel_groups(models: Path, tmp_path: Path) -> None:
    file = mesh_file(tmp_path, "no", dp_shard=4, tp=2)
    words = ["--model", models / "qwen3", "--json", "--", "--gradient_accumulation_steps", "2"]
    sentences = proven(["num_processes 8 -> 4", "mesh 1 x 4 x 2 -> 1 x 2 x 2"], file, *words)
    whole, held = (int(sentences["train and save"].split()[place].replace(",", "")) for place in (-2, -4))
    assert whole / 4 <= held < whole / 4 + 100, sentences  # norms alone are not split


def test_divided_experts(models: Path, tmp_path: Path) -> None:
    words = ["--model", models / "qwen3_moe", "--json", "--", "--expert_parallel_size", "8"]
    changes = ["num_processes 8 -> 2", "--expert_parallel_size 8 -> 2"]
    sentences = proven(changes, mesh_file(tmp_path, "bf16"), *words)
    assert "gradients and weights of the first 2 steps are those of one process" in sentences["train in bf16"]


def test_a_norm_of_split_heads_that_is_summed_too_often_is_found(models: Path, text_data: Path, tmp_path: Path) -> None:
    """transformers 5.23 without the patch of train/sft.py: only gradients show it, from the second micro-batch on."""
    script = tmp_path / "unpatched.py"
    script.write_text(UNPATCHED.format(str(SFT)))
    (tmp_path / "out").mkdir()
    words = ["--model_name_or_path", models / "qwen3", "--dataset_name", text_data, "--output_dir", tmp_path / "out"]
    words += ["--max_steps", "1", "--gradient_accumulation_steps", "2", "--per_device_train_batch_size", "1"]
    file = mesh_file(tmp_path, "no", dp_shard=4, tp=2)
    step = rehearsed(file, script, *words)
    assert (step["passed"], step["key"]) == (False, "the script"), step
    assert "k_norm.weight differs from that of one process" in step["said"], step


def job(ranks: int, version: int = 2, machines: int = 1, **sizes: int) -> JobConfig:
    more = {"parallelism_config": mesh(**sizes)} if sizes else {}
    common = {"distributed_type": "FSDP", "num_processes": ranks, "num_machines": machines}
    return JobConfig({**common, "fsdp_config": {"fsdp_version": version, "fsdp_sharding_strategy": 4}, **more})


SCALED: dict[str, tuple[JobConfig, dict[str, int], list[str]]] = {
    "replicas": (job(16, machines=2, dp_replicate=2, dp_shard=8), {},
                 ["num_processes 16 -> 4", "num_machines 2 -> 1", "mesh 2 x 8 -> 2 x 2"]),
    "tp": (job(8, tp=8), {}, ["num_processes 8 -> 2", "mesh 1 x 1 x 8 -> 1 x 1 x 2"]),
    "what is left shards": (job(8, tp=2), {}, ["num_processes 8 -> 4", "mesh 1 x 4 x 2 -> 1 x 2 x 2"]),
    "fsdp, tp on 6": (job(8, dp_shard=4, tp=2), {"processes": 6},
                      ["num_processes 8 -> 6", "mesh 1 x 4 x 2 -> 1 x 3 x 2"]),
    "replicas, tp": (job(8, dp_replicate=2, tp=4), {}, ["num_processes 8 -> 4", "mesh 2 x 1 x 4 -> 2 x 1 x 2"]),
    "all three": (job(32, dp_replicate=2, dp_shard=4, tp=4), {},
                  ["num_processes 32 -> 4", "mesh 2 x 4 x 4 -> 1 x 2 x 2, without replicas, which need --processes 8"]),
    "all three on 8": (job(32, dp_replicate=2, dp_shard=4, tp=4), {"processes": 8},
                       ["num_processes 32 -> 8", "mesh 2 x 4 x 4 -> 2 x 2 x 2"]),
    "ep over all": (job(8), {"experts": 8}, ["num_processes 8 -> 2", "--expert_parallel_size 8 -> 2"]),
    "ep over some": (job(8), {"experts": 2}, ["num_processes 8 -> 4", "--expert_parallel_size 2 -> 2"]),
    "ep over all on 4": (job(8), {"experts": 8, "processes": 4},
                         ["num_processes 8 -> 4", "--expert_parallel_size 8 -> 4"]),
    "ep of a group of tp": (job(16, dp_shard=4, tp=4), {"experts": 4},
                            ["num_processes 16 -> 4", "mesh 1 x 4 x 4 -> 1 x 2 x 2", "--expert_parallel_size 4 -> 2"]),
    "ep over groups of tp": (job(16, dp_shard=4, tp=4), {"experts": 16},
                             ["num_processes 16 -> 4", "mesh 1 x 4 x 4 -> 1 x 2 x 2",
                              "--expert_parallel_size 16 -> 4"]),
}  # fmt: skip


@pytest.mark.parametrize("name", SCALED)
def test_a_mesh_is_scaled(name: str) -> None:
    real, sizes, expected = SCALED[name]
    small, changes = scaled.scale(real, **sizes)
    assert changes == expected
    layout = scaled.small_layout(real, small, sizes.get("experts", 1))
    assert layout.replicas * layout.shard_ranks * layout.tensor == small.number("num_processes")
    assert not layout.experts_misfit


REFUSED: dict[str, tuple[JobConfig, dict[str, int]]] = {
    "--expert_parallel_size 3 on a mesh of fsdp 8 x ep 3": (job(8), {"experts": 3}),
    "tp_size alone becomes 2": (job(8, tp=8), {"processes": 4}),
    "cp_size can't be rehearsed": (job(8, cp=2, dp_shard=4), {}),
    "an even number of processes": (job(8, dp_shard=4, tp=2), {"processes": 3}),
    "--processes 3": (job(8, version=1), {"processes": 3}),
    "--processes 1": (job(8), {"processes": 1}),
    "tp_size can't be rehearsed under FSDP1": (job(8, version=1, tp=2), {}),
    "TPU can't be rehearsed": (JobConfig({"distributed_type": "XLA"}), {}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_fit_is_refused(message: str) -> None:
    real, sizes = REFUSED[message]
    with pytest.raises(UsageError) as refused:
        scaled.scale(real, **sizes)
    assert message in str(refused.value)


def test_real_numbers_that_a_mesh_does_not_divide_are_named(models: Path, tmp_path: Path) -> None:
    config = json.loads((models / "qwen3/config.json").read_text())
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps({**config, "num_key_value_heads": 2}))
    file = mesh_file(tmp_path, "no", dp_shard=2, tp=4)
    finished = accel_fsdp("rehearse", file, "--model", tmp_path / "model")
    assert finished.code == 1
    assert "2 key/value heads" in " ".join(finished.output.split())


def test_a_mesh_divides_the_small_model(tmp_path: Path) -> None:
    """The rehearsal's mesh is another one than the real mesh, of which these counts are multiples."""
    odd = {"num_attention_heads": 6, "num_key_value_heads": 3, "num_experts": 6, "vocab_size": 510}
    settings = {**SIZES, **EXPERTS, "hidden_size": 32, **odd, "tie_word_embeddings": True}
    AutoConfig.for_model("qwen3_moe", **settings).save_pretrained(tmp_path / "real")
    sizes = {"fsdp": 2, "tp": 2, "ep": 4}
    small = shrink(str(tmp_path / "real"), tmp_path / "small", parallel_plans.divisors(sizes))
    assert list(parallel_plans.divisible_by_config(read_config(str(small.folder))).misfits(sizes)) == []


def test_another_script_has_only_what_splits_nothing(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("print('nothing')\n")
    file = mesh_file(tmp_path, "no", dp_shard=4, tp=2)
    finished = accel_fsdp("rehearse", file, "--script", tmp_path / "own.py")
    assert finished.code == 2
    assert "tp_size can't be rehearsed with own.py" in finished.output
