"""More rules about the training script's arguments (`--args`), some of them with the model (`--model`)."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from accel_fsdp.checkpoints import store
from accel_fsdp.config import Engine
from accel_fsdp.errors import near_key
from accel_fsdp.job import UNLESS_SFT, from_arguments
from accel_fsdp.linter.rules.engine import Finding, Subject, rule

TRAINING_KEYS = frozenset({
    "version", "cpu_offload", "auto_wrap_policy", "min_num_params", "transformer_layer_cls_to_wrap",
    "cpu_ram_efficient_loading", "state_dict_type", "activation_checkpointing", "reshard_after_forward",
    "forward_prefetch", "backward_prefetch", "use_orig_params", "sync_module_states", "limit_all_gathers",
    "xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt", "xla_fsdp_settings",
})  # fmt: skip
"""The keys of TrainingArguments.fsdp_config that transformers 5.23 reads, without their optional prefix."""


def training_config(subject: Subject) -> Mapping[str, Any]:
    """`fsdp_config` of the arguments, as a mapping or JSON text; a path is not followed."""
    value = subject.arg("fsdp_config")
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json.loads(value)
        except ValueError:
            return {}
    if not isinstance(value, Mapping):
        return {}
    return {str(key).removeprefix("fsdp_"): content for key, content in value.items()}


def _words(value: Any) -> set[str]:
    return set(from_arguments.names_in(value))


@rule("AF616", "warning", pains=("P98",))
def resuming_under_fsdp1(subject: Subject) -> Iterator[Finding]:
    """Resuming under FSDP1 with SHARDED_STATE_DICT, by `--resume_from_checkpoint`.

    A new optimizer has no state yet, so Accelerate 1.15 silently loads none from the checkpoint: Adam's moments start
    at zero. train/sft.py creates the state first; most scripts don't.
    """
    if subject.engine is Engine.FSDP1 and subject.sharded_state_dict and subject.resumes and not subject.uses_sft:
        yield Finding(
            "fsdp_config.fsdp_version",
            "FSDP1 does not load a sharded optimizer state",
            f"moments silently start at zero{UNLESS_SFT}",
            "fsdp_version: 2",
        )


@rule("AF618", "warning", pains=("P38",))
def offload_from_the_arguments(subject: Subject) -> Iterator[Finding]:
    """`cpu_offload` in `--fsdp_config` only.

    Accelerate adds a backend for CPU tensors when the YAML asks for offload or FULL_STATE_DICT. Otherwise clipping
    stops with "No backend type associated with device type cpu".
    """
    written = str(subject.fsdp("fsdp_state_dict_type")).upper() == "FULL_STATE_DICT"
    offloads = bool(training_config(subject).get("cpu_offload")) or "offload" in _words(subject.arg("fsdp"))
    if offloads and not subject.on("fsdp_offload_params") and not written and not subject.arg("ddp_backend"):
        yield Finding(
            "fsdp_config.fsdp_offload_params",
            "offload is asked for in the arguments only",
            "clipping gradients stops: No backend type associated with device type cpu",
            "fsdp_offload_params: true here, or --ddp_backend cuda:nccl,cpu:gloo",
        )


@rule("AF619", pains=("P28", "P52"))
def training_config_without_effect(subject: Subject) -> Iterator[Finding]:
    """`--fsdp_config` with keys that transformers doesn't read, or without `--fsdp`, which turns it on.

    TrainingArguments have other names than this file. Offload is `cpu_offload` there, and any text in it counts as
    true, even "false". SIZE_BASED_WRAP without `min_num_params`, which is 0 there, wraps nothing.
    """
    config = training_config(subject)
    if subject.arg("fsdp_config") and not subject.arg("fsdp"):
        yield Finding("", "--fsdp_config without --fsdp", "it is ignored", "put its settings into this file")
    for key in (key for key in config if key not in TRAINING_KEYS):
        near = "cpu_offload" if key == "offload_params" else near_key(key, TRAINING_KEYS)
        what = f"--fsdp_config: nothing reads {key}.{f' Did you mean {near}?' if near else ''}"
        yield Finding("", what, "it is dropped silently", f"remove {key}")
    if str(config.get("cpu_offload")).lower() in ("false", "no", "0") and config["cpu_offload"]:
        yield Finding("", '--fsdp_config: cpu_offload is the text "false"', "text counts as true", "cpu_offload: false")
    if config.get("auto_wrap_policy") == "SIZE_BASED_WRAP" and not config.get("min_num_params"):
        what = "--fsdp_config: SIZE_BASED_WRAP without min_num_params"
        yield Finding("", what, "nothing is wrapped", "min_num_params: N", milder="warning")


@rule("AF622", pains=("P73",))
def adapter_on_a_tied_weight(subject: Subject) -> Iterator[Finding]:
    """LoRA on one of two tied weights (`--model`) under FSDP2, in a way at which `prepare` stops.

    `modules_to_save` copies the head, or with `fsdp_cpu_ram_efficient_loading: false` the embedding: transformers ties
    the weights again under names that PEFT has moved, or the tied weight belongs to two units. An adapter on `lm_head`
    moves its name as well, which train/sft.py repairs. `trainable_token_indices` hides the embedding. FSDP1 trains all
    of these.
    """
    if subject.engine is not Engine.FSDP2 or subject.model is None or not subject.model.tied:
        return
    loads_once = subject.on("fsdp_cpu_ram_efficient_loading")
    saved = _words(subject.arg("modules_to_save") or subject.arg("lora_modules_to_save"))
    adapted = _words(subject.arg("target_modules") or subject.arg("lora_target_modules"))
    stops = "prepare stops: KeyError: attribute 'weight' already exists"
    if subject.arg("trainable_token_indices"):
        yield Finding(
            "fsdp_config.fsdp_version",
            "trainable_token_indices hides the tied embedding from FSDP2",
            "prepare stops: neither a parameter nor a buffer",
            "modules_to_save: embed_tokens, without trainable_token_indices",
        )
    if saved & (set(HEAD) if loads_once else {*HEAD, *EMBEDDING}):
        yield Finding(
            "",
            f"modules_to_save names {' and '.join(sorted(saved & {*HEAD, *EMBEDDING}))} of a model that ties the two",
            stops if loads_once else "prepare stops: Parameter is shared with another FSDP group",
            "modules_to_save: embed_tokens alone, with fsdp_cpu_ram_efficient_loading: true",
        )
    elif adapted & set(HEAD) and loads_once and not subject.uses_sft:
        yield Finding(
            "",
            "an adapter on lm_head, which the model ties to its embedding",
            f"{stops}{UNLESS_SFT}",
            "leave lm_head out, or fsdp_cpu_ram_efficient_loading: false",
        )


HEAD, EMBEDDING = ("lm_head",), ("embed_tokens",)
"""The two modules that share a tied weight, as most models call them."""


@rule("AF628", "warning", pains=("P87",))
def device_map_in_the_arguments(subject: Subject) -> Iterator[Finding]:
    """`--device_map auto` spreads one model over all GPUs, in each rank: Accelerate refuses to train it."""
    if subject.is_fsdp and subject.arg("device_map") == "auto":
        yield Finding(
            "distributed_type",
            "--device_map auto is for one process",
            "Accelerate stops: loaded with device_map='auto'",
            "drop --device_map",
        )


@rule("AF638", "error")
def password_in_uri(subject: Subject) -> Iterator[Finding]:
    """A `--checkpoint_uri` with a password or a signature.

    Job files, logs and run.json would show it. train/sft.py refuses it.
    """
    if store.PASSWORD.search(str(subject.arg("checkpoint_uri") or "")):
        yield Finding(
            "",
            "--checkpoint_uri holds a password or a signature",
            "job files and logs show it, and train/sft.py refuses it",
            "the variables or files of the store's own tools, such as AWS_PROFILE",
        )
