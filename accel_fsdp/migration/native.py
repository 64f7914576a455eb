"""Translates an FSDP2 YAML to the JSON of transformers' `DistributedConfig`, and back.

Checked against transformers 5.23. The JSON has sizes and two switches. Everything else comes from the model's plan,
torchrun or arguments of the script.
"""

import math
from collections.abc import Mapping
from typing import Any

from accel_fsdp.config import (
    DISTRIBUTED_TYPES,
    EXPERT_FLAG,
    NATIVE_AXES,
    NATIVE_DEFAULTS,
    NATIVE_SIZES,
    ROW_AXES,
    TARGETS,
    Engine,
    expert_refusal,
    size_key,
)
from accel_fsdp.errors import UsageError
from accel_fsdp.migration.changes import Change, Draft, Migration, as_int, show

DATA_SIZES = NATIVE_SIZES[:2]
NATIVE = "transformers' DistributedConfig"
TORCHRUN: Mapping[str, str] = {
    "num_processes": "torchrun --nproc-per-node, or WORLD_SIZE",
    "num_machines": "torchrun --nnodes",
    "machine_rank": "torchrun --node-rank",
    "main_process_ip": "torchrun --master-addr",
    "main_process_port": "torchrun --master-port",
    "gpu_ids": "CUDA_VISIBLE_DEVICES",
}
LOST: Mapping[str, str] = {
    "fsdp_version": "its only engine is FSDP2",
    "fsdp_auto_wrap_policy": "the model's own plan makes the units: layers, embedding, norm with head",
    "fsdp_transformer_layer_cls_to_wrap": "the model's own plan names its layers",
    "fsdp_cpu_ram_efficient_loading": "each rank reads its own shards of the files",
    "fsdp_state_dict_type": "save_pretrained writes whole weights, with distributed_checkpoint=True shards; "
    "Trainer saves no optimizer of such a model: --save_only_model true",
}
"""FSDP2's keys that have no field, and what decides instead."""
BREAKS: Mapping[str, tuple[str, str]] = {
    "fsdp_activation_checkpointing": ("an argument of the script", "--gradient_checkpointing true"),
    "fsdp_activation_checkpointing_offload": ("it has no offload of activations", ""),
}


def to_native(draft: Draft, experts: int) -> tuple[Migration, dict[str, Any]]:
    """The rows of an FSDP2 file's keys, and the JSON's content with `experts` ranks of expert parallelism.

    Raises:
        UsageError: the sizes are unknown, or transformers refuses them.
    """
    sizes = {**_sizes(draft), "ep_size": experts}
    if refused := expert_refusal(sizes):
        raise UsageError(refused, why="transformers refuses it", fix="--expert-parallel-size with another number")
    if experts > 1:
        draft.changes.append(Change(EXPERT_FLAG, "renamed", str(experts), str(experts), "ep_size"))
    switches = {"fsdp_cpu_offload": draft.on("fsdp_offload_params"), "fsdp_mixed_precision": _precision(draft, sizes)}
    if "fsdp_offload_params" in draft.read:
        draft.row("fsdp_offload_params", "renamed", new_key="fsdp_cpu_offload")
    _lose_keys(draft)
    rows = draft.migration(TARGETS["fsdp2"], NATIVE).changes
    return Migration(TARGETS["fsdp2"], NATIVE, changes=rows), {**sizes, **switches}


def _sizes(draft: Draft) -> dict[str, int]:
    """The mesh's sizes; without a mesh in the file, all ranks shard."""
    mesh, processes = {axis: draft.size(axis) or 1 for axis in draft.job.mesh}, draft.job.number("num_processes")
    if not processes:
        raise UsageError(
            "num_processes is not known", why="fsdp_size is a number of ranks", fix="num_processes: N in the file"
        )
    others = [f"{axis}_size" for axis in ROW_AXES if mesh[axis] > 1]
    if "parallelism_config" in draft.job.values:
        why = f"no {', '.join(others)} there" if others else ", ".join(NATIVE_AXES)
        draft.top("parallelism_config", "lost" if others else "renamed", why, breaks=bool(others))
    sizes = {name: mesh[axis] for name, axis in NATIVE_AXES.items()}
    return sizes if math.prod(mesh.values()) > 1 else {**sizes, "fsdp_size": processes}


def _precision(draft: Draft, sizes: Mapping[str, int]) -> bool:
    """Records `mixed_precision`; returns whether FSDP computes in bfloat16, with gradients reduced in float32."""
    text = str(draft.job.top("mixed_precision")).lower()
    if text in ("no", "false"):
        draft.top("mixed_precision", "renamed", "fsdp_mixed_precision: false")
    elif text != "bf16":
        draft.top("mixed_precision", "lost", f"it supports only bfloat16, not {text}", breaks=True)
    elif math.prod(sizes[name] for name in DATA_SIZES) == 1:
        _mark_lost(draft, "mixed_precision", "read with FSDP only", "--bf16")
    else:
        draft.top(
            "mixed_precision",
            "changed",
            "fsdp_mixed_precision: gradients are reduced in float32, not bfloat16; weights stay in the dtype that they "
            "are loaded in, so dtype=torch.float32 for float32 masters",
        )
        return True
    return False


def _lose_keys(draft: Draft) -> None:
    """Drops the keys without a field in the JSON, with their replacement elsewhere or as a lost meaning."""
    for key, why in LOST.items():
        draft.row(key, "lost", why)
    if draft.on("fsdp_reshard_after_forward"):
        draft.row("fsdp_reshard_after_forward", "lost", "the model's own plan frees layers after forward too")
    else:
        why = "its plan frees layers after forward: DistributedConfig(fsdp_plan={'model.layers.*': 'keep_full_weight'})"
        draft.row("fsdp_reshard_after_forward", "lost", why, breaks=True)
    for key, (why, fix) in BREAKS.items():
        if draft.on(key):
            draft.row(key, "lost", why, breaks=True, fix=fix)
    draft.row("fsdp_ignored_modules", "lost", "it shards all modules", breaks=True)
    draft.lose_rest("off")
    dynamo = draft.job.section("dynamo_config")
    if str(dynamo.get("dynamo_backend", "NO")).upper() != "NO":
        _mark_lost(draft, "dynamo_config", "an argument of the script", "--torch_compile true")
    for key in draft.job.values:
        if key not in draft.reported and key != draft.section:
            draft.top(str(key), "lost", TORCHRUN.get(key, "nothing reads it"))


def _mark_lost(draft: Draft, key: str, why: str, fix: str) -> None:
    """Marks a top-level key as lost, because an argument of the script replaces it."""
    draft.reported.add(key)
    draft.changes.append(Change(key, "lost", show(draft.job.values.get(key)), why=why, breaks=True, fix=fix))


def from_native(values: Mapping[str, Any], layer_class: str) -> tuple[Migration, dict[str, Any], int]:
    """The rows of a JSON's fields, the YAML's content, and the ranks of expert parallelism.

    Raises:
        UsageError: transformers refuses the JSON.
    """
    sizes = {name: _size(values, name) for name in NATIVE_SIZES}
    *mesh, experts = sizes.values()
    if unknown := sorted(values.keys() - NATIVE_DEFAULTS.keys()):
        raise _refusal(f"DistributedConfig has no {', '.join(unknown)}", "transformers refuses it")
    if values.get("tp_plan") is not None and values.get(NATIVE_SIZES[2]) is None:
        raise _refusal(
            f"tp_plan without {NATIVE_SIZES[2]}", "tensor parallelism then takes all ranks, whose number isn't known"
        )
    if refused := expert_refusal(sizes):
        raise _refusal(refused, "transformers refuses it")
    mixed, offload = (values.get(name) is True for name in ("fsdp_mixed_precision", "fsdp_cpu_offload"))
    content: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": DISTRIBUTED_TYPES[Engine.FSDP2],
        "mixed_precision": "bf16" if mixed else "no",
        "num_processes": math.prod(mesh),
        "num_machines": 1,
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": True,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            **({"fsdp_transformer_layer_cls_to_wrap": layer_class} if layer_class else {}),
            "fsdp_offload_params": offload,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_cpu_ram_efficient_loading": True,
        },
    }
    if math.prod(mesh) > sizes[DATA_SIZES[1]]:
        content["parallelism_config"] = dict(zip(map(size_key, NATIVE_AXES.values()), mesh, strict=True))
    rows = [_field(name, value, experts) for name, value in values.items()]
    rows.append(Change("num_processes", "changed", "", str(content["num_processes"]), why="the product of the sizes"))
    rows.append(Change("num_machines", "changed", "", "1", why="from torchrun: correct it for several machines"))
    return Migration(NATIVE, TARGETS["fsdp2"], changes=tuple(rows)), content, experts


def _size(values: Mapping[str, Any], name: str) -> int:
    value = values.get(name)
    size = 1 if value is None else as_int(value) if isinstance(value, int) else None
    if not size:
        raise _refusal(f"{name}: {value}", "it has to be a whole number, 1 or more")
    return size


def _field(name: str, value: Any, experts: int) -> Change:
    """The row of one field of the JSON."""
    if name == "ep_size" and experts > 1:
        why = f"an argument of train/sft.py, in the YAML's launch line: {EXPERT_FLAG} {experts}"
        return Change(name, "renamed", show(value), show(value), EXPERT_FLAG, why)
    if name == "fsdp_mixed_precision" and value is True:
        why = "Accelerate reduces gradients in bfloat16, and makes float32 masters"
        return Change(name, "changed", "true", "bf16", "mixed_precision", why)
    if name == "fsdp_cpu_offload":
        return Change(name, "renamed", show(value), show(value), "fsdp_offload_params")
    if name in NATIVE_SIZES:
        key = size_key(NATIVE_AXES[name]) if name in NATIVE_AXES else ""
        return Change(name, "renamed", show(value), show(value or 1), key)
    harmless = value == NATIVE_DEFAULTS[name] or (name == "pp_size" and value == 1) or name.startswith("enable_")
    why = "its default" if harmless else "no key says it"
    return Change(name, "lost", show(value), why=why, breaks=not harmless)


def _refusal(what: str, why: str) -> UsageError:
    return UsageError(what, why=why, fix="correct the JSON")
