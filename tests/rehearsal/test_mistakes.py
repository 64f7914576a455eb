"""Mistakes that people make, planted one by one: a rehearsal fails on each and names the key, argument or line of it.

docs/rehearse.md shows the lines.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, accel_fsdp

SCRIPT = ROOT / "tests/rehearsal/mistaken.py"
FSDP1 = {
    "fsdp_version": 1, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_use_orig_params": True,
    "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer", "fsdp_sharding_strategy": "FULL_SHARD",
    "fsdp_state_dict_type": "SHARDED_STATE_DICT", "fsdp_cpu_ram_efficient_loading": False,
}  # fmt: skip
FSDP2 = {
    "fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_reshard_after_forward": True,
    "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer", "fsdp_state_dict_type": "SHARDED_STATE_DICT",
}  # fmt: skip
AT = re.compile(r"mistaken\.py:(\d+)$")


def yaml_file(folder: Path, fsdp: dict[str, Any], **top: Any) -> Path:
    path = folder / "fsdp.yaml"
    common = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "mixed_precision": "no"}
    path.write_text(yaml.safe_dump({**common, "num_machines": 1, "num_processes": 8, "fsdp_config": fsdp, **top}))
    return path


def rehearsed(folder: Path, model: Path, mistake: str, fsdp: dict[str, Any], **top: Any) -> dict[str, Any]:
    """The report on the script with a mistake."""
    words = ["--json", yaml_file(folder, fsdp, **top), "--script", SCRIPT, "--", mistake, model, folder / "saved"]
    finished = accel_fsdp("rehearse", *words)
    report: dict[str, Any] = json.loads(finished.output[finished.output.index("{\n") :])
    assert finished.code == (0 if report["passed"] else 1)
    return report


def line_of(text: str) -> int:
    """Where the mistake is made."""
    return next(number for number, line in enumerate(SCRIPT.read_text().splitlines(), 1) if text in line)


@pytest.mark.parametrize("fsdp", [FSDP1, FSDP2], ids=["fsdp1", "fsdp2"])
def test_without_a_mistake_it_passes(fsdp: dict[str, Any], tiny_model: Path, tmp_path: Path) -> None:
    report = rehearsed(tmp_path, tiny_model, "none", fsdp)
    assert report["passed"], report
    said = report["steps"][-1]["said"]
    assert re.match(rf"FSDP{fsdp['fsdp_version']}.* units; a rank holds at most [\d,]+ of [\d,]+ weights", said)


WITHOUT_STRATEGY = {key: value for key, value in FSDP1.items() if key != "fsdp_sharding_strategy"}
BY_YAML = {
    "wrong class": (FSDP1 | {"fsdp_transformer_layer_cls_to_wrap": "LlamaLayer"}, "Could not find", "cls_to_wrap"),
    "dead key": (FSDP1 | {"fsdp_shardign_strategy": 2}, "AF1", "fsdp_shardign_strategy"),
    "key of the other version": (
        WITHOUT_STRATEGY | {"fsdp_reshard_after_forward": "SHARD_GRAD_OP"},
        "AF302",
        "fsdp_reshard_after_forward",
    ),
    "size based": (FSDP2 | {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"}, "AF", "fsdp_auto_wrap_policy"),
}


@pytest.mark.parametrize("name", BY_YAML)
def test_of_the_yaml(name: str, tiny_model: Path, tmp_path: Path) -> None:
    fsdp, said, key = BY_YAML[name]
    failed = rehearsed(tmp_path, tiny_model, "none", fsdp)["steps"][-1]
    assert not failed["passed"]
    assert said in failed["said"]
    assert key in failed["key"]


BY_SCRIPT: dict[str, tuple[dict[str, Any], str, str]] = {
    "adapter": (
        FSDP2 | {"fsdp_activation_checkpointing": True},
        "save_pretrained left .* with 0 tensors",
        "state_dict=state",
    ),
    "saves on one rank": (FSDP2, "rank 0 waits in .*; rank 1 has ended", "accelerator.save_state"),
    "state dict on one rank": (FSDP2, "the ranks wait for each other", "accelerator.get_state_dict(model)"),
    "frozen layers": (
        FSDP1 | {"fsdp_use_orig_params": False},
        "uniform .requires_grad",
        "accelerator.prepare(model, o",
    ),
    "optimizer of other weights": (FSDP1, "the optimizer lacks .* of the model's trained parameters", ""),
    "torch clips": (FSDP1, "clipped by torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad_norm_"),
    "generate": (FSDP1, "weight", "generate(rows"),
    "part of the model": (FSDP2, "mixed torch.Tensor and DTensor", "model.embed_tokens(batch)"),
    "control flow": (FSDP1, "the ranks wait for each other|Connection closed", "accelerator.backward(loss)"),
    "experts": (
        FSDP2 | {"fsdp_transformer_layer_cls_to_wrap": "LlamaMLP"},
        "experts.0 where rank 1 runs .*experts.1",
        "",
    ),
    "forgotten random state": (FSDP1, "other random numbers", ""),
    "dataloader not prepared": (FSDP2, "all 2 ranks train on the same rows", ""),
    "saves shards": (FSDP1, "save_pretrained left .* with [\\d,]+ of [\\d,]+ weights", "save_pretrained(FOLDER)"),
    "cuda": (FSDP1, "Torch not compiled with CUDA enabled|No CUDA GPUs|NVIDIA", 'batch.to("cuda"'),
}


@pytest.mark.parametrize("name", BY_SCRIPT)
def test_of_the_script(name: str, tiny_model: Path, tmp_path: Path) -> None:
    fsdp, said, line = BY_SCRIPT[name]
    failed = rehearsed(tmp_path, tiny_model, name, fsdp)["steps"][-1]
    assert not failed["passed"]
    assert re.search(said, failed["said"]), failed
    assert failed["key"]
    if line:
        found = AT.search(failed["line"])
        assert found, failed
        assert abs(int(found[1]) - line_of(line)) <= 2
