"""Tensor and expert parallelism beside FSDP: `train/sft.py` on meshes of four ranks, against one plain process."""

import json
import logging
import math
import os
import re
from pathlib import Path

import pytest
import torch
from conftest import ROOT, SFT, accelerate_launch
from jobs import Jobs, launch, save
from packaging.version import Version
from peft import PeftModel
from reference import job_words, train
from safetensors.torch import load_file
from torch.distributed.tensor import _redistribute
from transformers import AutoConfig, AutoModelForCausalLM

from accel_fsdp.errors import UserError
from accel_fsdp.launch import launcher
from accel_fsdp.launch_environment import EXPORTED, MESH
from accel_fsdp.models import parallel_plans
from accel_fsdp.training import mesh

STEPS, BATCH = 3, 8
SMALL = {
    **{"vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 256},
    **{"pad_token_id": 0, "eos_token_id": 2, "bos_token_id": 1},
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
KINDS = {
    "qwen3": {},
    "phi3": {},
    "qwen3_moe": EXPERTS,
    "gpt_oss": {**EXPERTS, "sliding_window": 64},
}
MESHES = {
    "fsdp4": {},
    "fsdp2 x tp2": {"dp_shard": 2, "tp": 2},
    "replicas2 x tp2": {"dp_replicate": 2, "tp": 2},
    "tp4": {"tp": 4},
}
JOBS = {
    "qwen3 on fsdp2 x tp2": ("qwen3", "fsdp2 x tp2", 1),
    "gpt_oss on fsdp4, ep2": ("gpt_oss", "fsdp4", 2),
    "phi3 on replicas2 x tp2": ("phi3", "replicas2 x tp2", 1),
    "qwen3_moe, lora on fsdp4, ep2": ("qwen3_moe, lora", "fsdp4", 2),
}
PACKED = Version(torch.__version__) >= Version(parallel_plans.PACKED_SINCE)
PLAIN_SGD = ["--optim", "sgd", "--learning_rate", "1.0", "--max_grad_norm", "0"]
PLAIN_SGD += ["--export_dtype", "float32", "--max_steps", str(STEPS)]
"""Neither Adam nor clipping: they would hide a wrong scale of the gradients."""
LORA = ["--use_peft", "--lora_dropout", "0.0", "--lora_target_modules"]
LEGS = ("fsdp4", "fsdp2 x tp2, ep4" if PACKED else "fsdp4, ep4", "fsdp4, ep2", "fsdp4")
"""The meshes of a run of qwen3_moe, a step on each; on the first and last Accelerate shards, else transformers."""


def ranks_of(layout: str) -> int:
    return math.prod(MESHES[layout].values()) if MESHES[layout] else 4


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for kind, more in KINDS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SMALL, **more), dtype=torch.float32)
        for weight in model.parameters():
            if weight.dim() == 1:  # norms of nothing but ones and zeros would hide much
                weight.data.add_(torch.randn_like(weight) * 0.1)
        save(model, folder / kind, tiny_model)
    return folder


@pytest.fixture(scope="module")
def yamls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("yamls")
    for name, sizes in MESHES.items():
        keys_of_mesh = {f"parallelism_config_{axis}_size": size for axis, size in {"dp_shard": 1, **sizes}.items()}
        keys = {
            **{"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "mixed_precision": "no"},
            **{"num_machines": 1, "num_processes": ranks_of(name)},
            "fsdp_config": {
                **{"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
                "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            },
            **({"parallelism_config": keys_of_mesh} if sizes else {}),
        }
        (folder / f"{name}.yaml").write_text(json.dumps(keys))
    return folder


def words(files: tuple[Path, Path, Path], kind: str, layout: str, experts: int, *more: str) -> list[str]:
    """The arguments of a job with BATCH rows in a step, in micro-batches of one row."""
    models, yamls, data = files
    accumulated = BATCH * MESHES[layout].get("tp", 1) // ranks_of(layout)
    name, _, adapted = kind.partition(", ")
    return [
        *["--config_file", str(yamls / f"{layout}.yaml"), *job_words(models / name, data, models, STEPS, 1)],
        *([*LORA, *targets(name)] if adapted else []),
        *["--gradient_accumulation_steps", str(accumulated), "--expert_parallel_size", str(experts)],
        *more,
    ]


def targets(kind: str) -> tuple[str, ...]:
    """The layers of attention: PEFT's adapters don't go onto experts that are divided."""
    return ("qkv_proj", "o_proj") if kind == "phi3" else ("q_proj", "k_proj", "v_proj", "o_proj")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, models: Path, yamls: Path, text_data: Path) -> Jobs:
    """JOBS, then a run over LEGS."""
    runs, files = tmp_path_factory.mktemp("runs"), (models, yamls, text_data)
    jobs = {name: words(files, *job, *PLAIN_SGD) for name, job in JOBS.items()}
    saved = ["--save_strategy", "steps", "--save_steps", "1", "--eval_strategy", "steps", "--eval_steps", "1"]
    saved += ["--dataset_test_split", "train", "--export_dtype", "float32", "--resume_with_changes", "true"]
    for number, leg in enumerate(LEGS):
        layout, _, experts = leg.partition(", ep")
        more = [*saved, "--max_steps", str(number + 1)]
        if number:
            more += ["--resume_from_checkpoint", str(runs / f"leg {number - 1}" / f"checkpoint-{number}")]
        if number == 1:  # from the checkpoint of a mesh, the others gather
            more += ["--final_export", "stream"]
        jobs[f"leg {number}"] = words(files, "qwen3_moe", layout, int(experts or 1), *more)
    return launch(jobs, runs)


def weights(run: Path, base: Path | None = None) -> dict[str, torch.Tensor]:
    """Under the model's own names, which differ from those in files for fused experts; an adapter is merged."""
    model = AutoModelForCausalLM.from_pretrained(base or run / "final", dtype=torch.float32)
    if base:
        model = PeftModel.from_pretrained(model, run / "final").merge_and_unload()
    return dict(model.state_dict())


@pytest.mark.parametrize("name", JOBS)
def test_each_mesh_trains_as_one_process(name: str, trained: Jobs, models: Path, text_data: Path) -> None:
    """All losses, the norm of all gradients in each step, and each weight after three steps of uneven micro-batches."""
    kind, _, adapted = JOBS[name][0].partition(", ")
    how = {"lora": True, "targets": targets(kind)} if adapted else {}
    plain = train(models / kind, text_data, steps=STEPS, global_batch=BATCH, sgd=True, sgd_rate=1.0, **how)
    noted = trained.noted(name)
    assert noted["losses"] == pytest.approx(plain.losses, rel=1e-6)
    assert noted["norms"] == pytest.approx(plain.norms, rel=1e-5)
    base = models / kind if adapted else None
    for tensor, value in weights(trained.folder / name, base).items():
        torch.testing.assert_close(value, plain.weights[tensor], rtol=0, atol=1e-5, msg=tensor)


def test_each_rank_holds_its_part(trained: Jobs) -> None:
    name = "qwen3 on fsdp2 x tp2"
    total = sum(tensor.numel() for tensor in load_file(trained.folder / name / "final/model.safetensors").values())
    assert total / 4 <= trained.noted(name)["held"] < total / 4 + 200
    told = f"sharding: transformers, fsdp {'2 x tp 2' if PACKED else 4} x ep 4: each rank holds"
    assert told in trained.printed["leg 1"]


def test_packed_matrices_need_a_torch_that_saves_them(yamls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    become_rank(yamls / "fsdp2 x tp2.yaml", monkeypatch)
    mesh.choose(1)
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    mesh.check(AutoConfig.for_model("qwen3", **SMALL), "full")
    with pytest.raises(UserError, match=r"packed matrices, such as fused experts, with tp 2 and torch 2\.11"):
        mesh.check(AutoConfig.for_model("qwen3_moe", **SMALL, **EXPERTS), "full")


@pytest.mark.parametrize("there", [True, False])
def test_only_an_accelerator_offloads(
    there: bool, yamls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU FSDP stops in the first step: "Cannot access accelerator device when none is available"."""
    keys = json.loads((yamls / "fsdp4.yaml").read_text())
    keys["fsdp_config"]["fsdp_offload_params"] = True
    (tmp_path / "a.yaml").write_text(json.dumps(keys))
    become_rank(tmp_path / "a.yaml", monkeypatch)
    mesh.choose(2)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: there)
    assert mesh.loading()["distributed_config"].fsdp_cpu_offload == there


def test_a_run_goes_on_over_other_meshes(trained: Jobs, models: Path, text_data: Path) -> None:
    """From Accelerate's FSDP2 to tensor and expert parallelism and back, each step resumed from the last."""
    plain = train(models / "qwen3_moe", text_data, steps=len(LEGS), global_batch=BATCH)
    noted = trained.noted(f"leg {len(LEGS) - 1}")
    assert noted["losses"] == pytest.approx(plain.losses, rel=1e-5)
    assert noted["norms"] == pytest.approx(plain.norms, rel=1e-4)
    assert noted["held_out"][-1] == pytest.approx(plain.held_out, rel=1e-5)
    assert noted["accuracies"][-1] == pytest.approx(plain.held_out_accuracy, abs=1e-9)
    for number in range(len(LEGS)):  # the second was exported from its checkpoint, where files split the experts
        plain = train(models / "qwen3_moe", text_data, steps=number + 1, global_batch=BATCH)
        for tensor, value in weights(trained.folder / f"leg {number}").items():
            torch.testing.assert_close(value, plain.weights[tensor], rtol=0, atol=5e-4, msg=tensor)


SIX_HEADS = {"num_attention_heads": 6, "hidden_size": 36}
REFUSED = {
    "tp 4 doesn't divide the model's 6 attention heads": ("tp4", 1, SIX_HEADS, "full"),
    "--expert_parallel_size 3 on a mesh of fsdp 4": ("fsdp4", 3, {}, "full"),
    "an adapter with tp 4": ("tp4", 1, {}, "lora"),
    "packed weights, of 4-bit or 8-bit values, with ep 2": ("fsdp4", 2, {}, "qlora"),
    "a vocabulary of 510 in an embedding that is also the head": (
        *("fsdp2 x tp2", 1, {"vocab_size": 510, "tie_word_embeddings": True}),
        "full",
    ),
}
"""More of them are in `test_divided_models.py`."""


def become_rank(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of one of four ranks under this YAML."""
    environment = launcher.environment(launcher.launcher_args(file, SFT, ()))
    for name in [name for name in os.environ if name.startswith(EXPORTED)]:
        monkeypatch.delenv(name)
    for name, value in {**environment, "WORLD_SIZE": "4", MESH: ""}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("message", REFUSED)
def test_what_doesn_t_go_is_refused_before_weights_are_read(
    message: str, yamls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, experts, changed, method = REFUSED[message]
    become_rank(yamls / f"{file}.yaml", monkeypatch)
    config = AutoConfig.for_model("llama", **{**SMALL, **changed})

    def begin() -> None:
        mesh.choose(experts)
        mesh.check(config, method)

    with pytest.raises(UserError) as refused:
        begin()
    assert message in str(refused.value)


@pytest.mark.slow
def test_parts_of_gradients_that_no_plan_sums_stop_the_first_step(
    yamls: Path, tiny_model: Path, text_data: Path, tmp_path: Path
) -> None:
    """As of the scalars in Apertus' activation, which each rank applies to its own neurons."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("apertus", **SMALL, hidden_act="xielu")
    model = save(AutoModelForCausalLM.from_config(config, dtype=torch.float32), tmp_path / "apertus", tiny_model)
    job = job_words(model, text_data, tmp_path / "run", 2, 1)
    ended = accelerate_launch(yamls / "fsdp2 x tp2.yaml", ROOT / "tests/unsummed.py", *job)
    assert ended.code == 1
    assert re.search(r"the ranks of tp have other gradients of model.layers.\d.mlp.act_fn.alpha", ended.output)


def test_torch_does_not_warn_about_what_plans_determine(yamls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger(_redistribute.__name__)
    logger.setLevel(logging.NOTSET)
    become_rank(yamls / "fsdp2 x tp2.yaml", monkeypatch)
    mesh.choose(1)
    assert not logger.isEnabledFor(logging.WARNING)
