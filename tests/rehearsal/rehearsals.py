"""YAMLs of jobs, and reports of rehearsals of scripts."""

import json
from pathlib import Path
from typing import Any

import yaml
from conftest import accel_fsdp

FSDP1 = {
    "fsdp_version": 1, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_use_orig_params": True,
    "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer", "fsdp_sharding_strategy": "FULL_SHARD",
    "fsdp_state_dict_type": "SHARDED_STATE_DICT", "fsdp_cpu_ram_efficient_loading": False,
}  # fmt: skip
FSDP2 = {
    "fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_reshard_after_forward": True,
    "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer", "fsdp_state_dict_type": "SHARDED_STATE_DICT",
}  # fmt: skip


def yaml_file(folder: Path, fsdp: dict[str, Any], **top: Any) -> Path:
    """Of a job with FSDP, or with DDP if `fsdp` is empty."""
    path = folder / "fsdp.yaml"
    engine = {"distributed_type": "FSDP", "fsdp_config": fsdp} if fsdp else {"distributed_type": "MULTI_GPU"}
    common = {"compute_environment": "LOCAL_MACHINE", "mixed_precision": "no", "num_machines": 1, "num_processes": 8}
    path.write_text(yaml.safe_dump({**common, **engine, **top}))
    return path


def rehearsed(file: Path, script: Path, *words: str | Path) -> dict[str, Any]:
    """The last step of the report."""
    finished = accel_fsdp("rehearse", "--json", file, "--script", script, "--", *words)
    report = json.loads(finished.output[finished.output.index("{\n") :])
    assert finished.code == (0 if report["passed"] else 1)
    step: dict[str, Any] = report["steps"][-1]
    return step
