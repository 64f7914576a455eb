"""Equivalents of FSDP and DDP settings in DeepSpeed ZeRO and back, as far as the Accelerate YAML has them.

`deepspeed_config` has no key for activation checkpointing: it counts as broken, because the job may no longer fit
until the training script gets `--gradient_checkpointing true`.
"""

from accel_fsdp.config import DEFAULT_ZERO_STAGE, DISTRIBUTED_TYPES, HYBRID, ZERO_STAGES, ZERO_TWINS, Engine, zero_name
from accel_fsdp.migration.changes import ChangeKind, Draft, as_int
from accel_fsdp.migration.fsdp import casts_buffers, fsdp2_strategy

SHARDS = ("nothing", "optimizer state", "optimizer state and gradients", "everything")


def fsdp_to_zero(draft: Draft, stage: int) -> None:
    draft.top("distributed_type", "changed", "the new engine", value=DISTRIBUTED_TYPES[Engine.DEEPSPEED])
    draft.row("fsdp_version", "lost", "FSDP only")
    _strategy_to_stage(draft, stage)
    checkpoints = draft.on("fsdp_activation_checkpointing")
    why = "under ZeRO an argument of the script turns it on" if checkpoints else "off"
    fix = "--gradient_checkpointing true" if checkpoints else ""
    draft.row("fsdp_activation_checkpointing", "lost", why, breaks=checkpoints, fix=fix)
    offloads = draft.on("fsdp_activation_checkpointing_offload")
    draft.row("fsdp_activation_checkpointing_offload", "lost", "no such key", breaks=offloads)
    draft.row("fsdp_ignored_modules", "lost", "ZeRO shards all modules", breaks=True)
    _offload_to_zero(draft, stage)
    _loading_to_zero(draft, stage)
    draft.row("fsdp_state_dict_type", "lost", "DeepSpeed has its own checkpoints")
    draft.lose_rest("FSDP only")
    _add_zero_defaults(draft, stage)
    if draft.job.engine is Engine.FSDP1:
        casts_buffers(draft, "DeepSpeed leaves buffers in their dtype")


def ddp_to_zero(draft: Draft, stage: int) -> None:
    draft.lose_mesh("ZeRO has no mesh")
    why = f"{zero_name(stage)} shards {SHARDS[stage]}"
    draft.top("distributed_type", "changed", why, value=DISTRIBUTED_TYPES[Engine.DEEPSPEED])
    draft.add("zero_stage", stage, "as asked")
    draft.add("offload_optimizer_device", "none", "as before")
    draft.add("offload_param_device", "none", "as before")
    if stage == 3:
        draft.add("zero3_init_flag", False, "every rank loads the model, as before")
    _add_zero_defaults(draft, stage)
    casts_buffers(draft, "16-bit weights in place of autocast")


def _strategy_to_stage(draft: Draft, stage: int) -> None:
    if draft.job.engine is Engine.FSDP2:
        key = "fsdp_reshard_after_forward"
        strategy, broken = fsdp2_strategy(draft)
        if broken and "parallelism_config" in draft.job.values:
            draft.top("parallelism_config", "lost", broken, breaks=True)
        else:
            draft.lose_mesh("ZeRO has no mesh")
    else:
        key, strategy = "fsdp_sharding_strategy", draft.fsdp1_strategy()
        draft.lose_mesh("FSDP1 has no mesh")
    if as_int(draft.job.top("num_machines")) == 1:  # the group is the only machine
        strategy = ZERO_TWINS[ZERO_STAGES[strategy]]
    twin = ZERO_STAGES[strategy]
    is_exact = twin == stage
    why = f"{strategy} is {zero_name(twin)}" + ("" if is_exact else "; another was asked for")
    hybrid = strategy in HYBRID
    if hybrid:
        why = "hybrid is ZeRO++ or MiCS, in DeepSpeed's own JSON"
    kind: ChangeKind = "renamed" if is_exact and not hybrid else "changed"
    draft.row(key, kind, why, value=stage, new_key="zero_stage", breaks=hybrid)


def _offload_to_zero(draft: Draft, stage: int) -> None:
    device = "cpu" if draft.on("fsdp_offload_params") else "none"
    key = "fsdp_offload_params"
    why = "" if key in draft.read else "absent means no offload"
    draft.row(key, "renamed", why, value=device, new_key="offload_optimizer_device")
    if stage == 3:
        draft.add("offload_param_device", device, f"{key} covered it")
    else:
        why = "ZeRO-3 only: parameters stay on the GPU" if device == "cpu" else "as before"
        draft.add("offload_param_device", "none", why)


def _loading_to_zero(draft: Draft, stage: int) -> None:
    key = "fsdp_cpu_ram_efficient_loading"
    if stage == 3:
        why = "" if key in draft.read else "absent means on"
        draft.row(key, "renamed", why, value=draft.on(key), new_key="zero3_init_flag")
    elif draft.on(key):
        draft.row(key, "lost", "every rank loads the model: more host memory")


def _add_zero_defaults(draft: Draft, stage: int) -> None:
    draft.add("gradient_accumulation_steps", "auto", "from the training arguments")
    draft.add("gradient_clipping", "auto", "from the training arguments")
    if stage == 3:
        draft.add("zero3_save_16bit_model", True, "without it save_model writes no model")
    if (as_int(draft.job.top("num_machines")) or 1) > 1:
        draft.add("deepspeed_multinode_launcher", "standard", "started on each machine, as before")


def zero_stage(draft: Draft) -> int:
    """The stage that Accelerate would use: 2 by default, and 3 for a stage in DeepSpeed's own file."""
    if "zero_stage" in draft.read:
        return int(draft.value("zero_stage"))
    return 3 if "deepspeed_config_file" in draft.read else DEFAULT_ZERO_STAGE


def zero_to_fsdp(draft: Draft, version: int) -> None:
    stage = zero_stage(draft)
    draft.lose_mesh("ZeRO has no mesh")
    _convert_trainer_keys(draft)
    _drop_launcher_keys(draft)
    draft.row("deepspeed_config_file", "lost", "its content is not read", breaks=True)
    draft.row("deepspeed_moe_layer_cls_names", "lost", "FSDP needs none")
    draft.row("zero3_save_16bit_model", "lost", "fsdp_state_dict_type decides")
    if stage == 0 and version == 2:
        draft.row("zero_stage", "lost", "ZeRO-0 is DDP")
        draft.lose_rest("DDP has none")
        draft.top("distributed_type", "changed", "ZeRO-0 is DDP", value=DISTRIBUTED_TYPES[Engine.DDP])
        draft.without_section()
        casts_buffers(draft, "autocast in place of 16-bit weights")
        return
    draft.top("distributed_type", "changed", "the new engine", value=DISTRIBUTED_TYPES[Engine.FSDP1])
    drop_use_cpu(draft)
    draft.add("fsdp_version", version, "the new engine")
    _stage_to_strategy(draft, stage, version)
    _offload_to_fsdp(draft, stage)
    loads = stage == 3 and (draft.on("zero3_init_flag") or "zero3_init_flag" not in draft.read)
    _loading_to_fsdp(draft, loads)
    add_wrapping(draft)
    draft.add("fsdp_state_dict_type", "SHARDED_STATE_DICT", "ZeRO's checkpoints are sharded")
    draft.lose_rest("DeepSpeed only")
    if version == 1:
        casts_buffers(draft, "FSDP1 casts buffers too")


def ddp_to_fsdp(draft: Draft, version: int) -> None:
    """DDP becomes FSDP1's NO_SHARD, or FSDP2, which has no mode that shards nothing."""
    is_fsdp1 = version == 1
    draft.lose_mesh("FSDP1 has no mesh" if is_fsdp1 else "DDP reads none")
    why = "the new engine" if is_fsdp1 else "FSDP2 shards parameters, gradients and optimizer state"
    draft.top("distributed_type", "changed", why, value=DISTRIBUTED_TYPES[Engine.FSDP1])
    drop_use_cpu(draft)
    draft.add("fsdp_version", version, "the new engine")
    if is_fsdp1:
        draft.add("fsdp_sharding_strategy", "NO_SHARD", "DDP in FSDP1's words; FULL_SHARD shards")
    else:
        why = "FULL_SHARD; false keeps gathered parameters until the backward pass"
        draft.add("fsdp_reshard_after_forward", True, why)
    add_wrapping(draft)
    draft.add("fsdp_state_dict_type", "FULL_STATE_DICT", "DDP saves whole models")
    draft.add("fsdp_cpu_ram_efficient_loading", False, "every rank loads the model, as before")
    casts_buffers(draft, f"16-bit weights {'and buffers ' if is_fsdp1 else ''}in place of autocast")


def restage(draft: Draft, stage: int) -> None:
    draft.row("deepspeed_config_file", "lost", "the stage is in that file, which migrate doesn't read", breaks=True)
    draft.row("zero_stage", "changed", f"shards {SHARDS[stage]}", value=stage)
    if stage == 3:
        for key, why in (
            ("zero3_init_flag", "the model is built sharded"),
            ("zero3_save_16bit_model", "saves a model"),
        ):
            draft.row(key, "kept" if draft.on(key) else "changed", why, value=True)
    else:
        for key in ("zero3_init_flag", "zero3_save_16bit_model"):
            draft.row(key, "lost", "ZeRO-3 only")
        if draft.word("offload_param_device") != "NONE":
            draft.row("offload_param_device", "changed", "ZeRO-3 only: parameters stay on the GPU", value="none")


def _convert_trainer_keys(draft: Draft) -> None:
    """Accumulation and clipping, which DeepSpeed takes from the YAML and FSDP from the training arguments."""
    for key, flag, harmless in (
        ("gradient_accumulation_steps", "--gradient_accumulation_steps", ("auto", "1")),
        ("gradient_clipping", "--max_grad_norm", ("auto", "1", "1.0")),
    ):
        text = str(draft.value(key))
        breaks = text.lower() not in harmless
        draft.row(key, "lost", f"type {flag} {text}" if breaks else "from the training arguments", breaks=breaks)


def _drop_launcher_keys(draft: Draft) -> None:
    is_multi = (as_int(draft.job.top("num_machines")) or 1) > 1
    why = "accelerate launch on each machine" if is_multi else "one machine"
    launcher = str(draft.value("deepspeed_multinode_launcher")).lower()
    is_unsupported = is_multi and launcher not in ("none", "pdsh", "standard")
    draft.row("deepspeed_multinode_launcher", "lost", why, breaks=is_unsupported)
    for key in ("deepspeed_hostfile", "deepspeed_exclusion_filter", "deepspeed_inclusion_filter"):
        draft.row(key, "lost", why, breaks=is_multi and launcher != "standard")


def _stage_to_strategy(draft: Draft, stage: int, version: int) -> None:
    name = ZERO_TWINS.get(stage, ZERO_TWINS[2])  # stage 2 is nearest to stage 1
    value, key = (name, "fsdp_sharding_strategy") if version == 1 else (stage == 3, "fsdp_reshard_after_forward")
    why = "ZeRO-1 has no FSDP twin" if stage == 1 else f"{zero_name(stage)} is {name}"
    if "zero_stage" in draft.read:
        draft.row(
            "zero_stage", "changed" if stage == 1 else "renamed", why, value=value, new_key=key, breaks=stage == 1
        )
    else:
        draft.add(key, value, why)


def _offload_to_fsdp(draft: Draft, stage: int) -> None:
    """FSDP offloads parameters, gradients and optimizer state together, or nothing."""
    optimizer = draft.word("offload_optimizer_device") if stage > 0 else "NONE"
    parameters = draft.word("offload_param_device") if stage == 3 else "NONE"
    nvme, offloads = "NVME" in (optimizer, parameters), {optimizer, parameters} - {"NONE"} != set()
    offloads_both = optimizer == parameters or (stage != 3 and optimizer == "NONE")
    why = "FSDP has no NVMe offload" if nvme else "" if offloads_both else "FSDP offloads parameters too"
    kind: ChangeKind = "renamed" if offloads_both and not nvme else "changed"
    key = "offload_optimizer_device"
    if key in draft.read:
        draft.row(key, kind, why, value=offloads, new_key="fsdp_offload_params", breaks=nvme)
    else:
        draft.add("fsdp_offload_params", offloads, why or "as before", breaks=nvme)
    draft.row("offload_param_device", "lost", "fsdp_offload_params covers it" if stage == 3 else "ZeRO-3 only")


def _loading_to_fsdp(draft: Draft, loads: bool) -> None:
    key, why = "fsdp_cpu_ram_efficient_loading", "" if loads else "every rank loads the model, as before"
    if "zero3_init_flag" in draft.read:
        draft.row("zero3_init_flag", "renamed", why, value=loads, new_key=key)
    else:
        draft.add(key, loads, why or "as before")


def add_wrapping(draft: Draft) -> None:
    draft.add("fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP", "a unit per layer")
    if draft.layer_class:
        draft.add("fsdp_transformer_layer_cls_to_wrap", draft.layer_class, "--layer-class")


def drop_use_cpu(draft: Draft) -> None:
    """Drops a key that the launcher doesn't pass to ranks of FSDP, nor to those of DDP on GPUs."""
    if draft.job.values.get("use_cpu") is True:
        draft.top("use_cpu", "lost", "had no effect: not handed to the ranks")
