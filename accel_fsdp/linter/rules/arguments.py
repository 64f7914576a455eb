"""More rules about the training script's arguments (`--args`), some of them with the model (`--model`)."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from accel_fsdp.checkpoints import store
from accel_fsdp.config import LOW_DTYPES, Engine
from accel_fsdp.errors import near_key
from accel_fsdp.job import UNLESS_SFT, from_arguments
from accel_fsdp.linter.rules.engine import Finding, Subject, rule
from accel_fsdp.linter.rules.script import TRL, trainer_classes
from accel_fsdp.models import state_bytes
from accel_fsdp.units import gib_or_mib

WRITE_BYTES_PER_SECOND = 500_000_000
"""Bytes per second that a rank writes to a good network disk. Slower ones are common: the rule may stay silent."""
DEFAULT_TIMEOUT = 1800
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
    """Resuming under FSDP1 with SHARDED_STATE_DICT, by `--resume_from_checkpoint` or `--checkpoint`.

    A new optimizer has no state yet, so Accelerate 1.15 silently loads none from the checkpoint: Adam's moments start
    at zero. train/sft.py creates the state first; most scripts don't.
    """
    resumes = subject.resumes or (subject.checkpoint is not None and subject.checkpoint.sharded)
    if subject.engine is Engine.FSDP1 and subject.sharded_state_dict and resumes and not subject.uses_sft:
        yield Finding(
            "fsdp_config.fsdp_version",
            "FSDP1 does not load a sharded optimizer state",
            f"moments silently start at zero{UNLESS_SFT}",
            "fsdp_version: 2",
        )


@rule("AF617", "note", pains=("P26",))
def slow_checkpointing(subject: Subject) -> Iterator[Finding]:
    """`--gradient_checkpointing` in full training gathers each layer once more in backward.

    FSDP's own checkpointing doesn't. With LoRA the argument is the right one (AF601).
    """
    by_script = subject.arg_on("gradient_checkpointing", "activation_checkpointing")
    if subject.is_fsdp and subject.trains_everything and by_script and not subject.on("fsdp_activation_checkpointing"):
        yield Finding(
            "fsdp_config.fsdp_activation_checkpointing",
            "--gradient_checkpointing gathers each layer once more",
            "steps are slower than with FSDP's own",
            "fsdp_activation_checkpointing: true, without the argument",
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


@rule("AF624", "warning", pains=("P16",))
def saving_outlasts_the_timeout(subject: Subject) -> Iterator[Finding]:
    """Rank 0 writes a gathered checkpoint for longer than the other ranks wait (`--ddp_timeout`, 1800 s by default).

    With Adam that is 16 bytes per parameter, or 8 if `--dtype` asks for 16 bits without mixed precision; another
    `--optim` stores less or more. The assumed speed is 0.5 GB per second. Needs `--model` and `--args`.
    """
    if subject.model is None or not subject.is_fsdp or not subject.full_state_dict or not subject.trains_everything:
        return
    limit = str(subject.arg("ddp_timeout") or DEFAULT_TIMEOUT)
    seconds = subject.checkpoint_bytes // WRITE_BYTES_PER_SECOND
    if limit.isdecimal() and seconds > int(limit):
        yield Finding(
            "fsdp_config.fsdp_state_dict_type",
            f"rank 0 writes a checkpoint for about {seconds} s, the others wait {limit} s",
            "NCCL's watchdog ends the job",
            f"fsdp_state_dict_type: SHARDED_STATE_DICT, or --ddp_timeout {seconds * 2}",
        )


@rule("AF625", "note", pains=("P17",))
def accumulation_keeps_gradients(subject: Subject) -> Iterator[Finding]:
    """Gradient accumulation keeps whole gradients on every rank between micro-batches.

    Needs `--model` and `--args`.
    """
    steps = str(subject.arg("gradient_accumulation_steps") or 1)
    syncs = "sync_each_batch" in str(subject.arg("accelerator_config"))
    if subject.model is None or not subject.is_fsdp or not subject.trains_everything or steps == "1" or syncs:
        return
    size = gib_or_mib(subject.model.parameters * state_bytes.LOW)
    yield Finding(
        "distributed_type",
        f"{steps} accumulated micro-batches keep {size} or more of gradients on each GPU",
        "memory that a run without accumulation doesn't need",
        "--accelerator_config with gradient_accumulation_kwargs: {sync_each_batch: true} (not FSDP1 with offload)",
    )


@rule("AF626", "note", pains=("P13",))
def every_rank_converts(subject: Subject) -> Iterator[Finding]:
    """`--dtype float32` for a 16-bit checkpoint (`--model`): every rank converts the whole model in host memory.

    In transformers 5.23 ranks other than 0 read too, also with `fsdp_cpu_ram_efficient_loading`.
    """
    is_16_bit = subject.model is not None and subject.model.dtype in LOW_DTYPES
    if subject.is_fsdp and is_16_bit and subject.asked_dtype == "float32":
        yield Finding(
            "fsdp_config.fsdp_cpu_ram_efficient_loading",
            "each rank converts all weights to float32 while loading",
            "host memory: 4 bytes per parameter and rank",
            "--dtype auto with mixed_precision: bf16, which casts at prepare",
        )


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


@rule("AF629", "warning", pains=("P58",))
def adapter_on_fused_experts(subject: Subject) -> Iterator[Finding]:
    """LoRA's `target_parameters` on fused experts under FSDP: "shape is invalid for input of size"."""
    target_parameters = subject.arg("target_parameters") or subject.arg("lora_target_parameters")
    if subject.is_fsdp and "expert" in str(target_parameters):
        yield Finding(
            "distributed_type",
            "target_parameters reads experts that FSDP has sharded",
            "the first step often stops: shape is invalid",
            "target_modules, without the experts",
        )


@rule("AF632", "note", pains=("P100",))
def held_out_loss_over_ranks(subject: Subject) -> Iterator[Finding]:
    """`--eval_strategy` in several processes: Trainer's held-out loss of the last batch may be far too low or high.

    Trainer 5.23 divides each rank's sum by the tokens of all ranks, including repeated rows, and then drops the ranks
    behind the last row. With few held-out rows this error decides early stopping and the best model. train/sft.py sums
    losses and tokens over the ranks; most scripts don't.
    """
    strategy = subject.arg("eval_strategy") or subject.arg("evaluation_strategy")
    evaluates = subject.arg_on("do_eval", "eval_on_start") or str(strategy or "no").lower() not in (
        "no",
        "none",
        "false",
    )
    if evaluates and subject.number("num_processes") > 1 and subject.engine is not Engine.NONE and not subject.uses_sft:
        yield Finding(
            "num_processes",
            f"the held-out loss of {subject.number('num_processes')} processes is off in its last batch",
            f"of few rows that is too low or too high by tenths{UNLESS_SFT}",
            "as many held-out rows as fill whole batches of all processes; or compute_metrics of your own",
        )


@rule("AF633", "note", pains=("P101",))
def loss_in_sixteen_bits(subject: Subject) -> Iterator[Finding]:
    """bf16 or fp16 under FSDP2 (with `--args`): the loss itself is rounded to 16 bits, to steps of 1/32 near 6.

    Accelerate gives FSDP2 an `output_dtype`. Rounded losses are often equal, which triggers early stopping and hides
    small gains. train/sft.py keeps the loss in float32.
    """
    if subject.engine is Engine.FSDP2 and subject.mixed and subject.args is not None and not subject.uses_sft:
        yield Finding(
            "mixed_precision",
            "FSDP2 rounds the loss to 16 bits",
            "near 6 it moves in steps of 1/32, which early stopping and the best model take for equal",
            "compute the loss in the script, in float32, or train with train/sft.py",
        )


@rule("AF636", "warning", pains=("P106",))
def count_in_sixteen_bits(subject: Subject) -> Iterator[Finding]:
    """bf16 or fp16 under FSDP with transformers 5.23 or newer (`--args`, `--script`): gradients are wrongly scaled.

    Trainer, and TRL's SFTTrainer before 1.15, give the model the number of a step's tokens as a float, and FSDP casts
    floats. bfloat16 rounds 271 tokens to 272: loss and gradients are off by up to 0.4 %, by a different factor in each
    step. In float16 more than 65,504 tokens become infinity, and nothing is trained. transformers 5.22 counts in
    integers, which FSDP doesn't cast. train/sft.py divides outside of the model.
    """
    counts_in_floats = "transformers" in subject.versions and not subject.older("transformers", "5.23")
    low = subject.is_fsdp and subject.mixed and not subject.uses_sft
    if counts_in_floats and low and not _positive(subject.arg("label_smoothing_factor")) and _gives_the_count(subject):
        yield Finding(
            "mixed_precision",
            "FSDP rounds the number of tokens by which the model divides its loss",
            "loss and gradients are off by up to 0.4 % in bf16, and 0 in fp16 for over 65,504 tokens in a step",
            "pip install 'transformers<5.23', or train/sft.py",
        )


def _gives_the_count(subject: Subject) -> bool:
    """Whether a Trainer of the script leaves the loss to the model; without a script, whether it has arguments."""
    if subject.script is None:
        return subject.args is not None
    of_trl = {name.replace("Config", "Trainer") for name in TRL}
    own_loss = of_trl - ({"SFTTrainer"} if subject.older("trl", "1.15") else set())
    return bool(trainer_classes(subject) - own_loss)


@rule("AF634", "warning", pains=("P102",))
def dropout_drawn_twice(subject: Subject) -> Iterator[Finding]:
    """Dropout in the arguments with FSDP2's activation checkpointing: backward recomputes with other random numbers.

    Accelerate 1.15 checkpoints without the generators' states, so the gradients belong to a different forward pass than
    the loss. train/sft.py then uses the layers' own checkpointing.
    """
    dropouts = [name for name, value in (subject.args or {}).items() if "dropout" in name and _positive(value)]
    is_on = subject.engine is Engine.FSDP2 and subject.on("fsdp_activation_checkpointing")
    if is_on and dropouts and not subject.uses_sft:
        yield Finding(
            "fsdp_config.fsdp_activation_checkpointing",
            f"--{dropouts[0]} with FSDP2's activation checkpointing",
            "backward drops other activations than forward, so the gradients belong to another loss",
            "fsdp_activation_checkpointing: false and --gradient_checkpointing true, or no dropout",
        )


def _positive(value: Any) -> bool:
    return (from_arguments.number(value, 0) or 0) > 0


@rule("AF635", "warning", pains=("P104",))
def best_model_of_shards(subject: Subject) -> Iterator[Finding]:
    """`--load_best_model_at_end` with SHARDED_STATE_DICT: the newest checkpoint is never recorded as the best.

    Trainer 5.23 looks for the folder before it is created. If a fast rank creates it before another one looks, ranks
    disagree, and loading hangs. train/sft.py creates the folder first.
    """
    if (
        subject.is_fsdp
        and subject.sharded_state_dict
        and subject.arg_on("load_best_model_at_end")
        and not subject.uses_sft
    ):
        yield Finding(
            "fsdp_config.fsdp_state_dict_type",
            "--load_best_model_at_end overlooks the newest checkpoint",
            f"an older model counts as the best, or ranks that disagree hang{UNLESS_SFT}",
            "fsdp_state_dict_type: FULL_STATE_DICT, or train/sft.py",
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


@rule("AF639", pains=("P107",))
def adapters_recomputed_under_fsdp1(subject: Subject) -> Iterator[Finding]:
    """Adapters under FSDP1 with mixed precision, its activation checkpointing and BACKWARD_PRE: backward stops.

    PEFT 0.21 casts a layer's input to the dtype of the adapter's weight, which FSDP1 keeps in float32 while sharded and
    in 16 bits while gathered. A unit that is prefetched for backward is gathered early, so that torch recomputes other
    dtypes than forward saved. train/sft.py turns the cast off, as autocast does it. Adapters on attention alone pass.
    """
    targets = from_arguments.targets_of(_words(subject.arg("lora_target_modules")))
    adapts = subject.args is not None and subject.uses_adapter and targets == "all"
    prefetches = str(subject.fsdp("fsdp_backward_prefetch")).upper() in ("1", "BACKWARD_PRE")
    recomputes = prefetches and subject.on("fsdp_activation_checkpointing")
    if subject.engine is Engine.FSDP1 and adapts and subject.mixed and recomputes and not subject.uses_sft:
        yield Finding(
            "fsdp_config.fsdp_backward_prefetch",
            "FSDP1 with adapters, mixed precision, activation checkpointing and BACKWARD_PRE",
            "backward stops: Recomputed values for the following tensors have different metadata",
            "fsdp_backward_prefetch: BACKWARD_POST, or train/sft.py",
        )
