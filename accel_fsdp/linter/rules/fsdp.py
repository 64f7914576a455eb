"""Rules about what the FSDP settings do together, and what other engines make of them."""

from accel_fsdp.config import (
    BY_NAME,
    DEFAULT_ZERO_STAGE,
    FALSE_WORDS,
    HYBRID,
    RESHARDS,
    STRATEGIES,
    TRUE_WORDS,
    Edit,
    Engine,
)
from accel_fsdp.job import from_arguments
from accel_fsdp.linter.rules.engine import Cases, Each, Row, combined
from accel_fsdp.linter.rules.subject import Subject

SECTION = "fsdp_config"
RESHARD, STRATEGY, VERSION, POLICY = (
    f"{SECTION}.{key}"
    for key in ("fsdp_reshard_after_forward", "fsdp_sharding_strategy", "fsdp_version", "fsdp_auto_wrap_policy")
)
STATE, RECOMPUTE = f"{SECTION}.fsdp_state_dict_type", f"{SECTION}.fsdp_activation_checkpointing"
ONLY_1 = ("fsdp_sharding_strategy", "fsdp_backward_prefetch", "fsdp_use_orig_params", "fsdp_sync_module_states")
"""Keys that show that FSDP1 is meant."""
TO_SHARDED = (Edit(SECTION, "fsdp_state_dict_type", "SHARDED_STATE_DICT"),)
TO_WRAP = Edit(SECTION, "fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP")
TO_LAYERS = (TO_WRAP, Edit(SECTION, "fsdp_min_num_params"))
ONE_UNIT = "every rank gathers the whole model at once"


def _no_version(subject: Subject) -> Cases:
    """A note beside keys of FSDP1, as older releases of Accelerate wrote files; a choice where it looks like FSDP2."""
    if not subject.is_fsdp or subject.has("fsdp_version"):
        return None
    like_2 = _looks_like_2(subject)
    fix = "fsdp_version: 2 if FSDP2 was meant; fsdp_version: 1 for what runs today" if like_2 else "fsdp_version: 1"
    return {
        "though": ", though fsdp_reshard_after_forward looks like FSDP2" if like_2 else "",
        "fix": fix,
        "edits": () if like_2 else (Edit(SECTION, "fsdp_version", 1),),
        "severity": "note" if any(subject.has(key) for key in ONLY_1) else None,
    }


def _looks_like_2(subject: Subject) -> bool:
    boolean = str(subject.fsdp("fsdp_reshard_after_forward")).lower() in TRUE_WORDS + FALSE_WORDS
    return subject.has("fsdp_reshard_after_forward") and boolean and not any(subject.has(key) for key in ONLY_1)


def _reshard_under_fsdp1(subject: Subject) -> Cases:
    """The launcher always exports a sharding strategy, FULL_SHARD if none is given, and that one is used.

    A note if that is the same, a warning if the file has a strategy.
    """
    if subject.engine is not Engine.FSDP1 or not subject.has("fsdp_reshard_after_forward"):
        return None
    if subject.has("fsdp_version") and subject.fsdp("fsdp_version") is None:
        return None  # AF202
    fix, edits = _instead_of_reshard(subject)
    value, reshards = str(subject.fsdp("fsdp_reshard_after_forward")).upper(), RESHARDS.get(subject.strategy)
    is_same = value == subject.strategy or (value.lower() in TRUE_WORDS and reshards is True)
    is_same = is_same or (value.lower() in FALSE_WORDS and reshards is False)
    severity = "note" if is_same else "warning" if subject.has("fsdp_sharding_strategy") else None
    same = ", the same strategy" if is_same else ""
    return {"strategy": subject.strategy, "same": same, "fix": fix, "edits": edits, "severity": severity}


def _instead_of_reshard(subject: Subject) -> tuple[str, tuple[Edit, ...]]:
    """The replacement of `fsdp_reshard_after_forward` under FSDP1, and its edit if that is unambiguous."""
    key, strategy = "fsdp_reshard_after_forward", "fsdp_sharding_strategy"
    value = str(subject.fsdp(key)).upper()
    if not subject.has("fsdp_version") and _looks_like_2(subject):
        return f"keep it with fsdp_version: 2, or {strategy} in its place with fsdp_version: 1", ()
    if subject.has(strategy):
        return f"remove it; {strategy}: {subject.fsdp(strategy)} stays", (Edit(SECTION, key),)
    if value in STRATEGIES.values():
        return f"{strategy}: {value}", (Edit(SECTION, key, new_key=strategy),)
    if value.lower() in TRUE_WORDS:
        return f"{strategy}: FULL_SHARD", (Edit(SECTION, key, "FULL_SHARD", new_key=strategy),)
    return f"{strategy}: SHARD_GRAD_OP if {value.lower()} meant that, else remove it", ()


def _strategy_under_fsdp2(subject: Subject) -> Cases:
    """A note where FSDP2 shards as the strategy says, so that removing it changes nothing."""
    if subject.engine is not Engine.FSDP2 or not subject.has("fsdp_sharding_strategy"):
        return None
    edits: tuple[Edit, ...] = (Edit(SECTION, "fsdp_sharding_strategy"),)
    meant = RESHARDS[subject.strategy] if subject.strategy in ("FULL_SHARD", "SHARD_GRAD_OP") else None
    if not subject.has("fsdp_reshard_after_forward"):
        edits = () if meant is None else (*edits, Edit(SECTION, "fsdp_reshard_after_forward", meant))
    is_same = meant is not None and meant == subject.on("fsdp_reshard_after_forward")
    return {"edits": edits, "severity": "note" if is_same else None}


def _reshard_is_a_name(subject: Subject) -> Cases:
    value = str(subject.fsdp("fsdp_reshard_after_forward")).upper()
    if subject.engine is not Engine.FSDP2 or value not in STRATEGIES.values():
        return None
    is_plain = not value.startswith(("H", "N"))
    edits = (Edit(SECTION, "fsdp_reshard_after_forward", RESHARDS.get(value)),) if is_plain else ()
    return {"value": value, "edits": edits}


def _only_fsdp1(subject: Subject) -> Each:
    """A note where the key says what FSDP2 does anyway."""
    done_anyway = {
        "fsdp_use_orig_params": True,
        "fsdp_forward_prefetch": False,
        "fsdp_sync_module_states": subject.on("fsdp_cpu_ram_efficient_loading"),
    }
    for key in subject.section(SECTION) if subject.engine is Engine.FSDP2 else ():
        engines = field.engines if (field := BY_NAME.get((SECTION, key))) else frozenset()
        special = ("fsdp_sharding_strategy", "fsdp_min_num_params")  # AF303, AF307
        if Engine.FSDP1 in engines and Engine.FSDP2 not in engines and key not in special:
            is_same = str(subject.fsdp(key)).upper() == "BACKWARD_PRE" or subject.on(key) is done_anyway.get(key)
            yield {"key": key, "edits": (Edit(SECTION, key),), "severity": "note" if is_same else None}


def _no_policy(subject: Subject) -> Cases:
    """An explicit NO_WRAP is kept by --fix."""
    if not subject.is_fsdp or subject.wrap_policy != "NO_WRAP" or subject.strategy == "NO_SHARD":
        return None
    is_missing, layer = not subject.has("fsdp_auto_wrap_policy"), "fsdp_transformer_layer_cls_to_wrap"
    return {
        "policy": " is missing: NO_WRAP" if is_missing else ": NO_WRAP",
        "unused": f"; {layer} is ignored" if subject.has(layer) else "",
        "edits": (TO_WRAP,) if is_missing else (),
    }


def _wraps_nothing(subject: Subject) -> Cases:
    if subject.engine is not Engine.FSDP1 or subject.wrap_policy != "SIZE_BASED_WRAP":
        return None
    smallest = str(subject.fsdp("fsdp_min_num_params"))
    largest = subject.model.largest_layer_parameters if subject.model else 0
    too_large = smallest.isdecimal() and 0 < largest < int(smallest)
    size = largest * 9 // 10 or "just under the size of a layer"
    return {"smallest": smallest, "size": size} if smallest == "0" or too_large else None


def _flattened(subject: Subject) -> Cases:
    """A warning beside a weight decay. Trainer makes units of their own for adapters."""
    if subject.engine is not Engine.FSDP1 or subject.on("fsdp_use_orig_params"):
        return None
    decays = subject.trains_everything and from_arguments.number(subject.arg("weight_decay"), 0)
    return {"severity": None if decays else "note"}


def _rounds_positions(subject: Subject) -> bool:
    """Not with layer classes of other models than language models, such as FluxTransformerBlock."""
    layers = str(subject.fsdp("fsdp_transformer_layer_cls_to_wrap") or "Layer").split(",")
    is_version_1 = subject.engine is Engine.FSDP1 and str(subject.fsdp("fsdp_version")) == "1"
    is_language = any(name.strip("[]' ").endswith("Layer") for name in layers)
    return is_version_1 and is_language and subject.top("mixed_precision") in ("bf16", "fp16")


def _tied_units(subject: Subject) -> Cases:
    tied = subject.is_fsdp and subject.model is not None and subject.model.tied
    return [{"name": name} for name in ("Embedding", "Linear") if tied and name in subject.layer_classes]


def _fp8_by_torchao(subject: Subject) -> bool:
    section = subject.section("fp8_config")
    is_ao = str(section.get("fp8_backend", section.get("backend"))).upper() == "AO"
    is_fp8 = subject.is_fsdp and subject.top("mixed_precision") == "fp8"
    return is_fp8 and is_ao and subject.on("fsdp_cpu_ram_efficient_loading")


def _offloads_nothing(subject: Subject) -> Cases:
    section = subject.section("deepspeed_config")
    stage = str(section.get("zero_stage", DEFAULT_ZERO_STAGE))
    device = str(section.get("offload_param_device", "none")).lower()
    is_deaf = subject.engine is Engine.DEEPSPEED and stage in ("0", "1", "2") and device in ("cpu", "nvme")
    return {"device": device, "stage": stage} if is_deaf else None


def _gathers_nothing(subject: Subject) -> bool:
    section = subject.section("deepspeed_config")
    is_off = str(section.get("zero3_save_16bit_model", False)).lower() != "true"
    is_stage_3 = subject.engine is Engine.DEEPSPEED and str(section.get("zero_stage")) == "3"
    return is_stage_3 and is_off and "deepspeed_config_file" not in section


def _copies_of_one_rank(subject: Subject) -> Cases:
    hybrid = subject.engine is Engine.FSDP1 and subject.strategy in HYBRID
    return {"strategy": subject.strategy} if hybrid and subject.ranks_here == 1 else None


ROWS = (
    Row(
        "AF301", "error", VERSION, "fsdp_version is missing, so Accelerate takes FSDP1{though}",
        "most keys mean something under one version only", "{fix}", _no_version, seen="P06 plugin transformers#45640",
    ),
    Row(
        "AF302", "error", RESHARD, "FSDP1 ignores fsdp_reshard_after_forward",
        "the model is trained with {strategy}{same}",
        "{fix}", _reshard_under_fsdp1, seen="P04 launcher ranks",
    ),
    Row(
        "AF303", "error", STRATEGY, "FSDP2 ignores fsdp_sharding_strategy",
        "the model is sharded as fsdp_reshard_after_forward says, fully by default",
        "fsdp_reshard_after_forward: true or false; hybrid: parallelism_config", _strategy_under_fsdp2,
        seen="P40 plugin",
    ),
    Row(
        "AF304", "error", RESHARD, "{value} is the FSDP1 spelling", "Accelerate stops: invalid truth value",
        "fsdp_reshard_after_forward: true (FULL_SHARD) or false (SHARD_GRAD_OP)", _reshard_is_a_name,
        seen="P67 P71 plugin",
    ),
    Row(
        "AF305", "warning", f"{SECTION}.{{key}}", "FSDP2 ignores {key}", "it has no effect", "remove {key}",
        _only_fsdp1,
        seen="P80 plugin",
    ),
    Row(
        "AF306", "warning", POLICY, "fsdp_auto_wrap_policy{policy}", f"{ONE_UNIT}{{unused}}",
        "fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP", _no_policy, seen="P09 plugin ranks",
    ),
    combined("AF307", "error", POLICY, "size-based-fsdp2", seen="P27 ranks", edit=TO_LAYERS),
    Row(
        "AF308", "warning", f"{SECTION}.fsdp_min_num_params",
        "with fsdp_min_num_params {smallest} no layer becomes a unit",
        ONE_UNIT, "fsdp_min_num_params: {size}", _wraps_nothing, seen="P28 plugin ranks",
    ),
    combined("AF309", "error", STATE, "local-state-fsdp2", seen="P68 P71 plugin", edit=TO_SHARDED),
    Row(
        "AF310", "warning", STATE, "LOCAL_STATE_DICT checkpoints do not reshard",
        "a run can't be resumed on another number of GPUs", "fsdp_state_dict_type: SHARDED_STATE_DICT",
        lambda s: s.engine is Engine.FSDP1 and s.state_dict_type == "LOCAL_STATE_DICT", TO_SHARDED,
        seen="P57 pytorch#64625",
    ),
    Row(
        "AF311", "error", f"{SECTION}.fsdp_sync_module_states",
        "fsdp_cpu_ram_efficient_loading needs synced module states",
        "the launcher refuses it", "remove fsdp_sync_module_states",
        lambda s: s.is_fsdp and s.on("fsdp_cpu_ram_efficient_loading") and not s.on("fsdp_sync_module_states"),
        (Edit(SECTION, "fsdp_sync_module_states"),), seen="P69 launcher",
    ),
    combined("AF312", "error", RECOMPUTE, "recompute-without-policy", seen="P70 ranks"),
    Row(
        "AF313", "error", f"{RECOMPUTE}_offload",
        "FSDP1 can't offload checkpoints: fsdp_activation_checkpointing_offload",
        "Accelerate stops", "remove it, or fsdp_version: 2",
        lambda s: s.engine is Engine.FSDP1 and s.on("fsdp_activation_checkpointing_offload"),
        (Edit(SECTION, "fsdp_activation_checkpointing_offload"),), seen="plugin",
    ),
    Row(
        "AF313", "error", f"{RECOMPUTE}_offload",
        "fsdp_activation_checkpointing_offload finds nothing to offload: fsdp_activation_checkpointing is off",
        "Accelerate stops", "fsdp_activation_checkpointing: true",
        lambda s: s.engine is Engine.FSDP2 and s.on("fsdp_activation_checkpointing_offload")
        and not s.on("fsdp_activation_checkpointing"),
        (Edit(SECTION, "fsdp_activation_checkpointing", True),),
    ),
    Row(
        "AF314", "error", SECTION, "fsdp_config beside distributed_type: DEEPSPEED",
        "DeepSpeed shards as deepspeed_config says, and nothing reads fsdp_config",
        "remove fsdp_config, or distributed_type: FSDP without deepspeed_config",
        lambda s: s.engine is Engine.DEEPSPEED and bool(s.section(SECTION)), seen="P08 launcher",
    ),
    Row(
        "AF314", "error", "distributed_type", "fsdp_config beside distributed_type: {kind}",
        "FSDP is not used and every GPU holds the whole model", "distributed_type: FSDP, or remove fsdp_config",
        lambda s: {"kind": s.top("distributed_type")}
        if s.section(SECTION) and s.engine in (Engine.DDP, Engine.NONE) and s.has_engine else None,
    ),
    Row(
        "AF317", "warning", f"{SECTION}.fsdp_use_orig_params",
        "weight decay will hit norms and biases, and units with frozen parts fail",
        "FSDP1 flattens a unit to one parameter: Trainer groups it by a new name, and it is trained whole or frozen",
        "fsdp_use_orig_params: true", _flattened,
        (Edit(SECTION, "fsdp_use_orig_params", True),), seen="P29 P30 ranks pytorch#101343",
    ),
    Row(
        "AF318", "note", "mixed_precision", "FSDP1 casts RoPE frequencies to 16 bits",
        "positions lose accuracy, more so in long sequences", "fsdp_version: 2", _rounds_positions,
        seen="P15 ranks transformers#25681",
    ),
    Row(
        "AF319", "error", f"{SECTION}.fsdp_transformer_layer_cls_to_wrap", "{name} is not a transformer layer",
        "tied embeddings fail: Parameter is shared with a parameter of another FSDP group",
        "name the decoder layer only", _tied_units, seen="P72 ranks",
    ),
    Row(
        "AF320", "error", SECTION, "on TPU nothing reads fsdp_config", "every core holds the whole model",
        "the xla keys of --fsdp_config in TrainingArguments",
        lambda s: s.engine is Engine.TPU and bool(s.section(SECTION)) and not s.on("fsdp_xla"),
        seen="P84 accelerate#422",
    ),
    Row(
        "AF321", "error", f"{SECTION}.fsdp_cpu_ram_efficient_loading",
        "torchao's FP8 and RAM-efficient loading exclude each other", "Accelerate stops",
        "fsdp_cpu_ram_efficient_loading: false", _fp8_by_torchao, seen="P86 accelerate.Accelerator",
    ),
    Row(
        "AF327", "warning", "deepspeed_config.offload_param_device",
        "offload_param_device: {device} has no effect with zero_stage: {stage}", "only stage 3 offloads parameters",
        "zero_stage: 3, or offload_param_device: none", _offloads_nothing, seen="DeepSpeed#1403",
    ),
    Row(
        "AF328", "warning", "num_processes", "{strategy} with one process on each machine",
        "it shards inside each machine, so every GPU holds the whole model",
        "more processes on each machine, or fsdp_sharding_strategy: FULL_SHARD", _copies_of_one_rank, seen="P103 ranks",
    ),
    Row(
        "AF406", "note", "deepspeed_config.zero_stage", "ZeRO-3 gathers no weights when it saves",
        "the output folder holds shards and no model, and train/sft.py refuses it",
        "zero3_save_16bit_model: true; a folder of shards: accel-fsdp export", _gathers_nothing,
        (Edit("deepspeed_config", "zero3_save_16bit_model", True),), seen="LlamaFactory#477",
    ),
)  # fmt: skip
