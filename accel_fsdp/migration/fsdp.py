"""Translates FSDP settings to the other version of FSDP, and to plain DDP. Checked against Accelerate 1.15.

FSDP1's hybrid sharding shards within each machine, FSDP2's within a mesh. NO_SHARD becomes DDP.
"""

from accel_fsdp.config import (
    DATA_AXES,
    DISTRIBUTED_TYPES,
    HYBRID,
    OTHER_AXES,
    RESHARDS,
    STATE_DICT_TYPES,
    Engine,
    hybrid_mesh,
)
from accel_fsdp.migration.changes import Change, Draft, as_int
from accel_fsdp.units import counted

STATE_DICT_DEFAULT = {Engine.FSDP1: "FULL_STATE_DICT", Engine.FSDP2: "SHARDED_STATE_DICT"}


def to_fsdp2(draft: Draft) -> None:
    """FSDP1 becomes FSDP2, or DDP if nothing was sharded."""
    draft.lose_mesh("FSDP1 has no mesh")
    strategy = draft.fsdp1_strategy()
    if strategy == "NO_SHARD":
        to_ddp(draft, "fsdp_sharding_strategy", "NO_SHARD is DDP")
        return
    draft.row("fsdp_version", "changed", "the new engine", value=2)
    why = "inside each machine: parallelism_config" if strategy in HYBRID else f"{strategy} in FSDP2's words"
    draft.row("fsdp_sharding_strategy", "renamed", why, value=RESHARDS[strategy], new_key="fsdp_reshard_after_forward")
    if strategy in HYBRID:
        _add_mesh(draft)
    draft.row("fsdp_backward_prefetch", "lost", "FSDP2 prefetches by itself")
    draft.row("fsdp_forward_prefetch", "lost", "FSDP2 has none; speed only")
    original = draft.on("fsdp_use_orig_params")
    why = "FSDP2 always uses them"
    draft.row("fsdp_use_orig_params", "lost", why if original else f"{why}: weight decay spares norms again")
    draft.row("fsdp_sync_module_states", "lost", "FSDP2 needs none")
    _keep_state_dict_type(draft, Engine.FSDP1, Engine.FSDP2)
    keep_wrapping(draft, Engine.FSDP2)
    casts_buffers(draft, "FSDP2 leaves buffers in their dtype")


def to_fsdp1(draft: Draft) -> None:
    """FSDP2 becomes FSDP1; its mesh must be one that FSDP1 can build."""
    strategy, broken = fsdp2_strategy(draft)
    draft.row("fsdp_version", "changed", "the new engine", value=1)
    why = f"{strategy} in FSDP1's words"
    draft.row("fsdp_reshard_after_forward", "renamed", why, value=strategy, new_key="fsdp_sharding_strategy")
    if "parallelism_config" in draft.job.values:
        why = broken or "FSDP1's groups are the machines"
        draft.top("parallelism_config", "lost", why, breaks=bool(broken))
    offloads = draft.on("fsdp_activation_checkpointing_offload")
    draft.row("fsdp_activation_checkpointing_offload", "lost", "FSDP1 can't offload checkpoints", breaks=offloads)
    draft.add("fsdp_backward_prefetch", "BACKWARD_PRE", "FSDP2 prefetches by itself, FSDP1 when this is set")
    _keep_state_dict_type(draft, Engine.FSDP2, Engine.FSDP1)
    keep_wrapping(draft, Engine.FSDP1)
    casts_buffers(draft, "FSDP1 casts buffers too")


def to_ddp(draft: Draft, key: str, why: str) -> None:
    """Migrates a job without sharding to plain DDP. Other settings of the section are lost."""
    draft.top("distributed_type", "changed", why, value=DISTRIBUTED_TYPES[Engine.DDP])
    draft.row(key, "lost", why)
    for name in ("fsdp_offload_params", "fsdp_activation_checkpointing"):
        draft.row(name, "lost", "DDP has none", breaks=draft.on(name))
    draft.row("fsdp_ignored_modules", "lost", "DDP syncs all modules", breaks=True)
    draft.row("fsdp_state_dict_type", "lost", "DDP saves whole models")
    draft.row("fsdp_cpu_ram_efficient_loading", "lost", "every rank loads the model")
    draft.lose_rest("nothing to shard")
    draft.without_section()
    casts_buffers(draft, "DDP computes under autocast")


def fsdp2_strategy(draft: Draft) -> tuple[str, str]:
    """FSDP1's strategy that behaves like the FSDP2 file, and the remaining difference (empty without one)."""
    reshards = draft.on("fsdp_reshard_after_forward")
    hybrid, broken = _mesh_is_hybrid(draft)
    if hybrid:
        return ("HYBRID_SHARD" if reshards else "HYBRID_SHARD_ZERO2"), broken
    return ("FULL_SHARD" if reshards else "SHARD_GRAD_OP"), broken


def _mesh_is_hybrid(draft: Draft) -> tuple[bool, str]:
    if not draft.job.section("parallelism_config"):
        return False, ""
    replicas, shards = (draft.size(axis) for axis in DATA_AXES)
    others = [f"{axis}_size" for axis in OTHER_AXES if draft.size(axis) != 1]
    processes, machines = _ranks(draft)
    if others:
        return False, f"no {', '.join(others)} there"
    if not processes or not machines or not replicas or not shards:
        return False, "num_processes is not known"
    if replicas * shards != processes or shards == 1:
        return False, "Accelerate refuses this mesh"
    if replicas == 1:
        return False, ""
    replicates_machines = replicas == machines
    return replicates_machines, "" if replicates_machines else f"{replicas} replicas on {counted(machines, 'machine')}"


def _ranks(draft: Draft) -> tuple[int | None, int | None]:
    return as_int(draft.job.top("num_processes")), as_int(draft.job.top("num_machines"))


def _add_mesh(draft: Draft) -> None:
    """Adds FSDP1's hybrid sharding as a mesh of FSDP2: one replica per machine."""
    processes, machines = _ranks(draft)
    if not processes or not machines or processes % machines or processes == machines:
        why = "hybrid needs num_processes: 2 or more on each machine"
        draft.changes.append(Change("parallelism_config", "lost", why=why, breaks=True))
        return
    why = "one replica per machine"
    for key, size in hybrid_mesh(machines, processes).items():
        draft.add(key, size, why, section="parallelism_config")


def _keep_state_dict_type(draft: Draft, old: Engine, new: Engine) -> None:
    key = "fsdp_state_dict_type"
    name = draft.word(key) if key in draft.read else STATE_DICT_DEFAULT[old]
    name = STATE_DICT_TYPES.get(name, name)
    if key not in draft.read:
        draft.row(key, "kept", f"{old.label}'s default, not {new.label}'s", value=name)
    elif name == "LOCAL_STATE_DICT" and new is Engine.FSDP2:
        draft.row(key, "changed", "FSDP2 has no LOCAL_STATE_DICT", value="SHARDED_STATE_DICT")
    else:
        draft.row(key, "kept", value=name if draft.word(key) in STATE_DICT_TYPES else None)


def keep_wrapping(draft: Draft, new: Engine) -> None:
    """Translates the wrap policy. FSDP2 can't wrap by size, and checkpoints each wrapped module."""
    key, policy = "fsdp_auto_wrap_policy", draft.word("fsdp_auto_wrap_policy")
    checkpoints = draft.on("fsdp_activation_checkpointing")
    if policy == "SIZE_BASED_WRAP" and new is Engine.FSDP2:
        draft.row("fsdp_min_num_params", "lost", "FSDP2 can't wrap by size")
        draft.row(key, "changed", "FSDP2 can't wrap by size", value="TRANSFORMER_BASED_WRAP")
    elif policy == "NO_WRAP" and checkpoints:
        why = "activation checkpointing needs a wrap policy"
        draft.row(key, "changed", why, value="TRANSFORMER_BASED_WRAP", breaks=True)
    elif key not in draft.read:
        draft.row(key, "kept", "absent means one unit, gathered whole", value="NO_WRAP")
    if policy != "SIZE_BASED_WRAP":
        draft.row("fsdp_min_num_params", "lost", "read under SIZE_BASED_WRAP only")
    wraps = policy != "NO_WRAP" or checkpoints
    keep_layer_class(draft, is_required=wraps and (policy != "SIZE_BASED_WRAP" or new is Engine.FSDP2))


def keep_layer_class(draft: Draft, is_required: bool) -> None:
    """Adds the layer class: the requested one, or that of the file without brackets and spaces."""
    key = "fsdp_transformer_layer_cls_to_wrap"
    if draft.layer_class and is_required:
        draft.row(key, "changed", "--layer-class", value=draft.layer_class)
    elif key in draft.read:
        classes = draft.value(key)
        parts = classes if isinstance(classes, list) else str(classes).split(",")
        names = ",".join(str(part).strip() for part in parts if str(part).strip())
        if names != classes and names:
            draft.row(key, "changed", "names joined by commas, without spaces", value=names)
        elif not names:
            draft.row(key, "lost", "names no class")


def casts_buffers(draft: Draft, why: str) -> None:
    """Reports a difference for 16-bit jobs: only FSDP1 casts buffers, including RoPE's frequencies."""
    if str(draft.job.top("mixed_precision")).lower() in ("bf16", "fp16"):
        draft.top("mixed_precision", "changed", why)
