"""Rules about what the FSDP settings do together."""

from collections.abc import Iterator

from accel_fsdp.config import BY_NAME, FALSE_WORDS, RESHARDS, STRATEGIES, TRUE_WORDS, Edit, Engine
from accel_fsdp.linter.rules.engine import Finding, Subject, combined, rule


@rule("AF301", pains=("P06",))
def version_missing(subject: Subject) -> Iterator[Finding]:
    """`fsdp_version` is missing.

    In the YAML that means FSDP1; the same omission in `TrainingArguments` means FSDP2. The settings of one are ignored
    by the other. A boolean `fsdp_reshard_after_forward` without keys of FSDP1 looks as if FSDP2 was meant, while FSDP1
    runs: `--fix` then leaves the choice to you. Beside keys of FSDP1, as older releases of Accelerate wrote
    files, it is a note.
    """
    if subject.is_fsdp and not subject.has("fsdp_version"):
        like_2 = _looks_like_2(subject)
        yield Finding(
            "fsdp_config.fsdp_version",
            "fsdp_version is missing, so Accelerate takes FSDP1"
            + (", though fsdp_reshard_after_forward looks like FSDP2" if like_2 else ""),
            "most keys mean something under one version only",
            "fsdp_version: 2 if FSDP2 was meant; fsdp_version: 1 for what runs today" if like_2 else "fsdp_version: 1",
            () if like_2 else (Edit("fsdp_config", "fsdp_version", 1),),
            milder="note" if any(subject.has(key) for key in ONLY_1) else None,
        )


ONLY_1 = ("fsdp_sharding_strategy", "fsdp_backward_prefetch", "fsdp_use_orig_params", "fsdp_sync_module_states")
"""Keys that show that FSDP1 is meant."""


def _looks_like_2(subject: Subject) -> bool:
    boolean = str(subject.fsdp("fsdp_reshard_after_forward")).lower() in TRUE_WORDS + FALSE_WORDS
    return subject.has("fsdp_reshard_after_forward") and boolean and not any(subject.has(key) for key in ONLY_1)


@rule("AF302", pains=("P04",))
def reshard_under_fsdp1(subject: Subject) -> Iterator[Finding]:
    """`fsdp_reshard_after_forward` under FSDP1, where nothing reads it.

    Accelerate's own wizard writes it there. The launcher always exports a sharding strategy, FULL_SHARD if none is
    given, and that one is used. `--fix` renames the key if its value is a strategy, and removes it beside a strategy;
    false stays, because SHARD_GRAD_OP may have been meant. A value that agrees with the strategy in use, as in TRL's
    file for FSDP1, is a note; one that differs from a strategy in the file is a warning.
    """
    if subject.engine is not Engine.FSDP1 or not subject.has("fsdp_reshard_after_forward"):
        return
    if subject.has("fsdp_version") and subject.fsdp("fsdp_version") is None:
        return  # AF202; nothing runs before the version is known
    fix, edits = _instead_of_reshard(subject)
    value = str(subject.fsdp("fsdp_reshard_after_forward")).upper()
    is_same = value == subject.strategy or (value.lower() in TRUE_WORDS and RESHARDS.get(subject.strategy) is True)
    is_same = is_same or (value.lower() in FALSE_WORDS and RESHARDS.get(subject.strategy) is False)
    yield Finding(
        "fsdp_config.fsdp_reshard_after_forward",
        "FSDP1 ignores fsdp_reshard_after_forward",
        f"the model is trained with {subject.strategy}" + (", the same strategy" if is_same else ""),
        fix,
        edits,
        milder="note" if is_same else "warning" if subject.has("fsdp_sharding_strategy") else None,
    )


def _instead_of_reshard(subject: Subject) -> tuple[str, tuple[Edit, ...]]:
    """The replacement of `fsdp_reshard_after_forward` under FSDP1, and its edit if that is unambiguous."""
    key, strategy = "fsdp_reshard_after_forward", "fsdp_sharding_strategy"
    value = str(subject.fsdp(key)).upper()
    if not subject.has("fsdp_version") and _looks_like_2(subject):
        return f"keep it with fsdp_version: 2, or {strategy} in its place with fsdp_version: 1", ()
    if subject.has(strategy):
        return f"remove it; {strategy}: {subject.fsdp(strategy)} stays", (Edit("fsdp_config", key),)
    if value in STRATEGIES.values():
        return f"{strategy}: {value}", (Edit("fsdp_config", key, new_key=strategy),)
    if value.lower() in TRUE_WORDS:
        return f"{strategy}: FULL_SHARD", (Edit("fsdp_config", key, "FULL_SHARD", new_key=strategy),)
    return f"{strategy}: SHARD_GRAD_OP if {value.lower()} meant that, else remove it", ()


@rule("AF303", pains=("P40",))
def strategy_under_fsdp2(subject: Subject) -> Iterator[Finding]:
    """`fsdp_sharding_strategy` under FSDP2, where nothing reads it.

    FSDP2 has `fsdp_reshard_after_forward` instead, true for FULL_SHARD and false for SHARD_GRAD_OP. Hybrid sharding
    is a mesh in `parallelism_config`, no sharding is plain DDP.
    """
    if subject.engine is not Engine.FSDP2 or not subject.has("fsdp_sharding_strategy"):
        return
    edits: tuple[Edit, ...] = (Edit("fsdp_config", "fsdp_sharding_strategy"),)
    if subject.strategy in ("FULL_SHARD", "SHARD_GRAD_OP") and not subject.has("fsdp_reshard_after_forward"):
        edits += (Edit("fsdp_config", "fsdp_reshard_after_forward", RESHARDS[subject.strategy]),)
    elif not subject.has("fsdp_reshard_after_forward"):
        edits = ()
    yield Finding(
        "fsdp_config.fsdp_sharding_strategy",
        "FSDP2 ignores fsdp_sharding_strategy",
        "the model is sharded as fsdp_reshard_after_forward says, fully by default",
        "fsdp_reshard_after_forward: true or false; hybrid: parallelism_config",
        edits,
    )


@rule("AF304", pains=("P67", "P71"))
def reshard_is_a_name(subject: Subject) -> Iterator[Finding]:
    """`fsdp_reshard_after_forward: FULL_SHARD` under FSDP2, which takes a boolean: "invalid truth value full_shard"."""
    value = str(subject.fsdp("fsdp_reshard_after_forward")).upper()
    if subject.engine is Engine.FSDP2 and value in STRATEGIES.values():
        intended = RESHARDS.get(value)
        edits = (
            (Edit("fsdp_config", "fsdp_reshard_after_forward", intended),) if not value.startswith(("H", "N")) else ()
        )
        yield Finding(
            "fsdp_config.fsdp_reshard_after_forward",
            f"{value} is the FSDP1 spelling",
            "Accelerate stops: invalid truth value",
            "fsdp_reshard_after_forward: true (FULL_SHARD) or false (SHARD_GRAD_OP)",
            edits,
        )


@rule("AF305", "warning", pains=("P80",))
def ignored_under_fsdp2(subject: Subject) -> Iterator[Finding]:
    """A key of FSDP1 under FSDP2, which ignores it, mostly silently."""
    if subject.engine is not Engine.FSDP2:
        return
    for key in subject.section("fsdp_config"):
        field = BY_NAME.get(("fsdp_config", key))
        special = ("fsdp_sharding_strategy", "fsdp_min_num_params")
        if field and Engine.FSDP1 in field.engines and Engine.FSDP2 not in field.engines and key not in special:
            yield Finding(
                f"fsdp_config.{key}",
                f"FSDP2 ignores {key}",
                "it has no effect",
                f"remove {key}",
                (Edit("fsdp_config", key),),
            )


@rule("AF306", "warning", pains=("P09",))
def no_wrap_policy(subject: Subject) -> Iterator[Finding]:
    """`fsdp_auto_wrap_policy` is missing or NO_WRAP, so the whole model is one unit.

    Then every rank gathers all of it at once. A layer class without the policy is ignored. `--fix` adds what is
    missing, and keeps an explicit NO_WRAP.
    """
    if subject.is_fsdp and subject.wrap_policy == "NO_WRAP" and subject.strategy != "NO_SHARD":
        is_missing = not subject.has("fsdp_auto_wrap_policy")
        edit = Edit("fsdp_config", "fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP")
        layer = "fsdp_transformer_layer_cls_to_wrap"
        yield Finding(
            "fsdp_config.fsdp_auto_wrap_policy",
            "fsdp_auto_wrap_policy is missing: NO_WRAP" if is_missing else "fsdp_auto_wrap_policy: NO_WRAP",
            "every rank gathers the whole model at once" + (f"; {layer} is ignored" if subject.has(layer) else ""),
            "fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
            (edit,) if is_missing else (),
        )


@rule("AF307", pains=("P27",))
def size_based_under_fsdp2(subject: Subject) -> Iterator[Finding]:
    """`SIZE_BASED_WRAP` under FSDP2: it also picks containers, which `fully_shard` refuses."""
    edits: tuple[Edit, ...] = (Edit("fsdp_config", "fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"),)
    if subject.has("fsdp_min_num_params"):
        edits += (Edit("fsdp_config", "fsdp_min_num_params"),)
    yield from combined(subject, "fsdp_config.fsdp_auto_wrap_policy", "size-based-fsdp2", edits=edits)


@rule("AF308", "warning", pains=("P28",))
def size_based_wraps_nothing(subject: Subject) -> Iterator[Finding]:
    """`SIZE_BASED_WRAP` with `fsdp_min_num_params` at 0, or above the model's largest layer: nothing is wrapped."""
    if subject.engine is not Engine.FSDP1 or subject.wrap_policy != "SIZE_BASED_WRAP":
        return
    smallest = str(subject.fsdp("fsdp_min_num_params"))
    largest = subject.model.largest_layer_parameters if subject.model else 0
    too_large = smallest.isdecimal() and 0 < largest < int(smallest)
    if smallest == "0" or too_large:
        yield Finding(
            "fsdp_config.fsdp_min_num_params",
            f"with fsdp_min_num_params {smallest} no layer becomes a unit",
            "every rank gathers the whole model at once",
            f"fsdp_min_num_params: {largest * 9 // 10 or 'just under the size of a layer'}",
        )


@rule("AF309", pains=("P68", "P71"))
def local_state_dict_under_fsdp2(subject: Subject) -> Iterator[Finding]:
    """`LOCAL_STATE_DICT` under FSDP2: Accelerate stops."""
    edit = Edit("fsdp_config", "fsdp_state_dict_type", "SHARDED_STATE_DICT")
    yield from combined(subject, "fsdp_config.fsdp_state_dict_type", "local-state-fsdp2", edits=(edit,))


@rule("AF310", "warning", pains=("P57",))
def local_state_dict(subject: Subject) -> Iterator[Finding]:
    """`LOCAL_STATE_DICT`: such checkpoints load on the same number of ranks only, and nothing exports them."""
    if subject.engine is Engine.FSDP1 and subject.state_dict_type == "LOCAL_STATE_DICT":
        edit = Edit("fsdp_config", "fsdp_state_dict_type", "SHARDED_STATE_DICT")
        yield Finding(
            "fsdp_config.fsdp_state_dict_type",
            "LOCAL_STATE_DICT checkpoints do not reshard",
            "a run can't be resumed on another number of GPUs",
            "fsdp_state_dict_type: SHARDED_STATE_DICT",
            (edit,),
        )


@rule("AF311", pains=("P69",))
def ram_loading_without_sync(subject: Subject) -> Iterator[Finding]:
    """`fsdp_sync_module_states: false` beside `fsdp_cpu_ram_efficient_loading`, which is on by default.

    The launcher refuses the combination under both versions, although FSDP2 doesn't use the key. The text 'false' is
    accepted, but FSDP1 turns syncing on again.
    """
    if subject.is_fsdp and subject.on("fsdp_cpu_ram_efficient_loading") and not subject.on("fsdp_sync_module_states"):
        edit = Edit("fsdp_config", "fsdp_sync_module_states")
        yield Finding(
            "fsdp_config.fsdp_sync_module_states",
            "fsdp_cpu_ram_efficient_loading needs synced module states",
            "the launcher refuses it",
            "remove fsdp_sync_module_states",
            (edit,),
        )


@rule("AF312", pains=("P70",))
def checkpointing_without_wrapping(subject: Subject) -> Iterator[Finding]:
    """`fsdp_activation_checkpointing` with NO_WRAP, which is also what a missing policy means.

    FSDP2 stops with "'NoneType' object is not callable"; FSDP1 checkpoints every single submodule. AF325 is about
    SIZE_BASED_WRAP.
    """
    yield from combined(subject, "fsdp_config.fsdp_activation_checkpointing", "recompute-without-policy")


@rule("AF313")
def checkpoint_offload_alone(subject: Subject) -> Iterator[Finding]:
    """`fsdp_activation_checkpointing_offload` without activation checkpointing, or under FSDP1: Accelerate stops."""
    if not subject.is_fsdp or not subject.on("fsdp_activation_checkpointing_offload"):
        return
    if subject.engine is Engine.FSDP1:
        edit = Edit("fsdp_config", "fsdp_activation_checkpointing_offload")
        yield Finding(
            "fsdp_config.fsdp_activation_checkpointing_offload",
            "FSDP1 can't offload checkpoints: fsdp_activation_checkpointing_offload",
            "Accelerate stops",
            "remove it, or fsdp_version: 2",
            (edit,),
        )
    elif not subject.on("fsdp_activation_checkpointing"):
        edit = Edit("fsdp_config", "fsdp_activation_checkpointing", True)
        yield Finding(
            "fsdp_config.fsdp_activation_checkpointing_offload",
            "fsdp_activation_checkpointing_offload finds nothing to offload: fsdp_activation_checkpointing is off",
            "Accelerate stops",
            "fsdp_activation_checkpointing: true",
            (edit,),
        )


@rule("AF314", pains=("P08",))
def fsdp_block_without_fsdp(subject: Subject) -> Iterator[Finding]:
    """An `fsdp_config` under another `distributed_type`, which doesn't read it.

    Under MULTI_GPU plain DDP runs, and every GPU holds the whole model; under DEEPSPEED `deepspeed_config` decides.
    """
    if subject.section("fsdp_config") and subject.engine is Engine.DEEPSPEED:
        yield Finding(
            "fsdp_config",
            "fsdp_config beside distributed_type: DEEPSPEED",
            "DeepSpeed shards as deepspeed_config says, and nothing reads fsdp_config",
            "remove fsdp_config, or distributed_type: FSDP without deepspeed_config",
        )
    if subject.section("fsdp_config") and subject.engine in (Engine.DDP, Engine.NONE):
        if not subject.has_engine:
            return  # AF101, AF203
        yield Finding(
            "distributed_type",
            f"fsdp_config beside distributed_type: {subject.top('distributed_type')}",
            "FSDP is not used and every GPU holds the whole model",
            "distributed_type: FSDP, or remove fsdp_config",
        )


@rule("AF317", "warning", pains=("P29", "P30"))
def use_orig_params_off(subject: Subject) -> Iterator[Finding]:
    """`fsdp_use_orig_params: false` under FSDP1.

    Trainer then finds no biases and norms among the flattened parameters and puts weight decay on them; a unit with
    frozen and trained parameters fails.
    """
    if subject.engine is Engine.FSDP1 and not subject.on("fsdp_use_orig_params"):
        yield Finding(
            "fsdp_config.fsdp_use_orig_params",
            "weight decay will hit norms and biases, and units with frozen parts fail",
            "Trainer groups parameters by name after they were flattened, and one flat parameter is trained or isn't",
            "fsdp_use_orig_params: true",
            (Edit("fsdp_config", "fsdp_use_orig_params", True),),
        )


@rule("AF318", "note", pains=("P15",))
def bf16_buffers_under_fsdp1(subject: Subject) -> Iterator[Finding]:
    """16-bit precision under FSDP1 casts buffers too, RoPE's frequencies among them.

    0.31622777 becomes 0.31640625, and the error of the angle grows with the position. FSDP2 leaves buffers alone.
    Not reported for layer classes of other models than language models, such as FluxTransformerBlock.
    """
    version = str(subject.fsdp("fsdp_version"))
    layers = str(subject.fsdp("fsdp_transformer_layer_cls_to_wrap") or "Layer").split(",")
    if not any(name.strip("[]' ").endswith("Layer") for name in layers):
        return
    if subject.engine is Engine.FSDP1 and version == "1" and subject.top("mixed_precision") in ("bf16", "fp16"):
        yield Finding(
            "mixed_precision",
            "FSDP1 casts RoPE frequencies to 16 bits",
            "positions lose accuracy, more so in long sequences",
            "fsdp_version: 2",
        )


@rule("AF319", pains=("P72",))
def wrapping_embeddings(subject: Subject) -> Iterator[Finding]:
    """`Embedding` or `Linear` as a layer class of a model (`--model`) whose embeddings are tied.

    They would belong to two units, which torch 2.13 refuses.
    """
    tied = subject.model is not None and subject.model.tied
    for name in ("Embedding", "Linear"):
        if subject.is_fsdp and tied and name in subject.layer_classes:
            yield Finding(
                "fsdp_config.fsdp_transformer_layer_cls_to_wrap",
                f"{name} is not a transformer layer",
                "tied embeddings fail: Parameter is shared with a parameter of another FSDP group",
                "name the decoder layer only",
            )
