"""Ready-made answers by name. `accelerate_configs/` holds the YAML of each, made by `make docs`."""

from collections.abc import Mapping

MODEL = "meta-llama/Llama-3.1-8B"
"""The model of the shipped files; every Llama has the same layer class."""

_BASE = {"method": "full", "gpus": "8xH100-80GB", "num_machines": "1"}
_FSDP1 = {**_BASE, "engine": "fsdp", "fsdp_version": "1"}
_FSDP2 = {**_BASE, "engine": "fsdp", "fsdp_version": "2"}
_ZERO = {**_BASE, "engine": "deepspeed"}
_TWO_NODES = {"gpus": "2x8xH100-80GB", "num_machines": "2", "main_process_ip": "10.0.0.1"}

PRESETS: Mapping[str, Mapping[str, str]] = {
    "fsdp1_full_shard": {**_FSDP1, "strategy": "1"},
    "fsdp1_shard_grad_op": {**_FSDP1, "strategy": "2"},
    "fsdp1_no_shard": {**_FSDP1, "strategy": "3", "cpu_offload": "false", "activation_checkpointing": "false"},
    "fsdp1_hybrid_shard": {**_FSDP1, "strategy": "4"},
    "fsdp1_hybrid_shard_zero2": {**_FSDP1, "strategy": "5"},
    "fsdp1_size_based": {**_FSDP1, "strategy": "1", "wrap_policy": "SIZE_BASED_WRAP"},
    "fsdp2": {**_FSDP2, "strategy": "1"},
    "fsdp2_no_reshard": {**_FSDP2, "strategy": "2"},
    "fsdp2_hybrid_2x8": {**_FSDP2, **_TWO_NODES, "strategy": "4"},
    "fsdp2_offload": {**_FSDP2, "strategy": "1", "cpu_offload": "true"},
    "fsdp2_checkpointing": {**_FSDP2, "strategy": "1", "activation_checkpointing": "true"},
    "fsdp2_lora": {**_FSDP2, "strategy": "1", "method": "lora"},
    "fsdp2_qlora": {**_FSDP2, "strategy": "1", "method": "qlora"},
    "fsdp2_two_nodes": {**_FSDP2, **_TWO_NODES, "strategy": "1"},
    "fsdp2_tp": {**_FSDP2, "strategy": "1", "tp": "2"},
    "fsdp2_hsdp_tp": {**_FSDP2, **_TWO_NODES, "strategy": "4", "tp": "2"},
    "fsdp2_moe_ep": {**_FSDP2, **_TWO_NODES, "model": "Qwen/Qwen3-30B-A3B", "strategy": "1", "ep": "8"},
    "ddp": {**_BASE, "engine": "ddp"},
    "zero1": {**_ZERO, "zero_stage": "1"},
    "zero2": {**_ZERO, "zero_stage": "2"},
    "zero3": {**_ZERO, "zero_stage": "3"},
    "zero3_offload": {**_ZERO, "zero_stage": "3", "cpu_offload": "true"},
    "tpu": {"method": "full", "gpus": "cpu", "num_machines": "1", "engine": "tpu", "num_processes": "8"},
}
