"""Rules about the launch, the layer classes and the training script's arguments."""

from collections.abc import Iterator

from accel_fsdp.config import DEFAULT_PORT, LAUNCH_PLACES, LOW_DTYPES, MULTI_CPU, TORCH_DTYPES, Edit, Engine
from accel_fsdp.errors import did_you_mean
from accel_fsdp.job import UNLESS_SFT, combinations
from accel_fsdp.linter.rules.engine import Finding, Subject, combined, rule
from accel_fsdp.units import listed


@rule("AF401")
def no_number_of_processes(subject: Subject) -> Iterator[Finding]:
    """`num_processes` is missing: `accelerate launch` stops unless it is on the command line."""
    is_bare_no = subject.values.get("distributed_type") is False  # AF208
    if subject.lacks_processes and subject.has_engine and not is_bare_no:
        value = subject.values.get("num_processes")
        yield Finding(
            "num_processes",
            "num_processes is missing" if value is None else f"num_processes: {value} means none",
            "accelerate launch stops without --num_processes",
            f"num_processes: {'1' if subject.engine is Engine.NONE else 'the GPUs of all machines together'}",
        )


@rule("AF407")
def too_few_processes(subject: Subject) -> Iterator[Finding]:
    """`num_processes` or `num_machines` below 1: nothing would run."""
    for key in ("num_processes", "num_machines"):
        value = subject.values.get(key)
        if isinstance(value, int) and value < 1 and value != -1:
            yield Finding(key, f"{key}: {value}", "nothing would run", f"{key}: 1 or more")


@rule("AF417", "note")
def processes_without_an_engine(subject: Subject) -> Iterator[Finding]:
    """`num_processes` above 1 beside `distributed_type: 'NO'`: Accelerate still starts only one process.

    TRL ships such a file for a single GPU.
    """
    number = subject.number("num_processes")
    if subject.is_alone and number > 1 and not subject.launcher.get("num_processes"):
        yield Finding(
            "num_processes",
            f"distributed_type: {subject.spelt('distributed_type', 'NO')} starts one process, not {number}",
            "the other GPUs stay idle",
            "num_processes: 1, or distributed_type: FSDP or MULTI_GPU for all of them",
        )


@rule("AF402", pains=("P44",))
def processes_do_not_divide(subject: Subject) -> Iterator[Finding]:
    """`num_processes` is the total over all machines; a remainder is silently dropped.

    9 processes on 2 machines start 4 on each, 1 process on 2 machines starts none.
    """
    processes, machines = subject.top("num_processes"), subject.top("num_machines")
    are_counts = isinstance(processes, int) and isinstance(machines, int) and processes > 0 and machines > 0
    if are_counts and processes % machines:
        yield Finding(
            "num_processes",
            f"{processes} processes don't divide by {machines} machines",
            f"each machine starts {processes // machines}",
            f"num_processes: {max(processes // machines, 1) * machines}",
        )


@rule("AF403", pains=("P46",))
def no_meeting_point(subject: Subject) -> Iterator[Finding]:
    """Several machines without `main_process_ip`: under `accelerate launch` the ranks wait at `None:29500`.

    It is an error if the job is started that way (`--args`). For a file alone it is a note: `accel-fsdp launch` needs
    no address if the cluster engine gives it, with the machine's number. DeepSpeed's own launchers, pdsh among them,
    take the machines from `deepspeed_hostfile` instead.
    """
    machines = subject.top("num_machines")
    section = subject.section("deepspeed_config") if subject.engine is Engine.DEEPSPEED else {}
    by_hostfile = section.get("deepspeed_multinode_launcher") != "standard" and section.get("deepspeed_hostfile")
    address = subject.launcher.get("main_process_ip") or subject.top("main_process_ip")
    if isinstance(machines, int) and machines > 1 and not address and not by_hostfile:
        yield Finding(
            "num_machines",
            f"{machines} machines and no main_process_ip",
            f"under accelerate launch they wait at None:{DEFAULT_PORT}",
            "main_process_ip: the address of machine 0; accel-fsdp launch takes it and the machine's number from "
            f"{listed(LAUNCH_PLACES, 'and')}, and accel-fsdp script writes their job files",
            milder=None if subject.starter == "accelerate" else "note",
        )


@rule("AF404", "note", pains=("P45",))
def machine_rank_in_the_file(subject: Subject) -> Iterator[Finding]:
    """`machine_rank` in a file for several machines.

    `accelerate config` writes it on each machine. A copy of that file gives all machines the same number.
    """
    machines = subject.top("num_machines")
    if isinstance(machines, int) and machines > 1 and "machine_rank" in subject.values:
        yield Finding(
            "machine_rank",
            "machine_rank is the same on every machine that has this file",
            "the job hangs when two machines have one number",
            "launch with --machine_rank N, unless each machine has its own file",
        )


@rule("AF405", "warning", pains=("P83",))
def use_cpu_under_an_engine(subject: Subject) -> Iterator[Finding]:
    """`use_cpu: true` under FSDP, DDP on GPUs, DeepSpeed or XLA: the launcher does not hand it to the ranks.

    It does so for `distributed_type: 'NO'` and `MULTI_CPU`.
    """
    kind = subject.values.get("distributed_type")
    if subject.engine is not Engine.NONE and kind != MULTI_CPU and subject.values.get("use_cpu") is True:
        yield Finding(
            "use_cpu",
            f"use_cpu does not reach the ranks under {kind}",
            "it has no effect",
            "use_cpu: false; train/sft.py detects it",
            (Edit("", "use_cpu", False),),
        )


@rule("AF406", "note")
def deepspeed_without_weights(subject: Subject) -> Iterator[Finding]:
    """ZeRO-3 without `zero3_save_16bit_model: true`: `save_model` writes a sharded checkpoint instead of a model.

    The weights are in it, and `accel-fsdp export` makes a model of them. train/sft.py requires the key.
    """
    section = subject.section("deepspeed_config")
    own_file = "deepspeed_config_file" in section
    is_off = str(section.get("zero3_save_16bit_model", False)).lower() != "true"
    if subject.engine is Engine.DEEPSPEED and str(section.get("zero_stage")) == "3" and is_off and not own_file:
        edit = Edit("deepspeed_config", "zero3_save_16bit_model", True)
        yield Finding(
            "deepspeed_config.zero_stage",
            "ZeRO-3 gathers no weights when it saves",
            "the output folder holds shards and no model, and train/sft.py refuses it",
            "zero3_save_16bit_model: true; a folder of shards: accel-fsdp export",
            (edit,),
        )


@rule("AF501", pains=("P10", "P65"))
def layer_class_not_in_the_model(subject: Subject) -> Iterator[Finding]:
    """A layer class that the model (`--model`) doesn't have: Accelerate stops at prepare."""
    if subject.model is None or not subject.is_fsdp:
        return
    for name in subject.layer_classes:
        if name not in subject.model.classes:
            classes = ",".join(layer.name for layer in subject.model.wrap_classes)
            edits = (Edit("fsdp_config", "fsdp_transformer_layer_cls_to_wrap", classes),) if classes else ()
            yield Finding(
                "fsdp_config.fsdp_transformer_layer_cls_to_wrap",
                f"{subject.model.name} has no {name}.{did_you_mean(name, subject.model.classes)}",
                "Accelerate stops: Could not find the transformer layer class",
                f"fsdp_transformer_layer_cls_to_wrap: {classes or 'NAME'}",
                edits,
            )


@rule("AF601", "warning", pains=("P01",))
def adapter_lost_by_checkpointing(subject: Subject) -> Iterator[Finding]:
    """LoRA with FSDP activation checkpointing.

    PEFT 0.21 finds no adapter tensors in modules that are wrapped for checkpointing: exports and sharded checkpoints
    silently hold none. train/sft.py repairs that; most scripts don't.
    """
    yield from combined(subject, "fsdp_config.fsdp_activation_checkpointing", "adapter-recompute")


@rule("AF602", "warning", pains=("P02", "P105"))
def adapter_lost_by_fsdp1(subject: Subject) -> Iterator[Finding]:
    """LoRA with FSDP1.

    PEFT 0.21 finds no adapter tensors below FSDP1's wrappers: exports and checkpoints hold none. train/sft.py repairs
    that; most scripts don't.
    """
    yield from combined(subject, "fsdp_config.fsdp_version", "adapter-fsdp1")


@rule("AF603", pains=("P25",))
def checkpointing_twice(subject: Subject) -> Iterator[Finding]:
    """Activation checkpointing in the YAML and in the arguments, which TRL sets by default: Trainer stops.

    train/sft.py takes the right one of the two.
    """
    twice = subject.arg_on("gradient_checkpointing", "activation_checkpointing")
    if subject.is_fsdp and subject.on("fsdp_activation_checkpointing") and twice and not subject.uses_sft:
        yield Finding(
            "fsdp_config.fsdp_activation_checkpointing",
            "activation checkpointing is on twice",
            "Trainer stops: can't both be set to True",
            "turn one off; with LoRA this one",
        )


@rule("AF604", pains=("P36", "P37"))
def optimizer_cannot_step(subject: Subject) -> Iterator[Finding]:
    """An optimizer (`--optim`) that can't work on the engine's parameters: the first step stops.

    Adafactor and all of bitsandbytes' under FSDP2, GaLore and APOLLO under FSDP1, layerwise ones in several processes.
    """
    names = combinations.names_about("optimizer", "stops")
    yield from combined(subject, "fsdp_config.fsdp_version" if subject.is_fsdp else "distributed_type", *names)


@rule("AF605", pains=("P36", "P37"))
def optimizer_cannot_be_saved(subject: Subject) -> Iterator[Finding]:
    """An optimizer (`--optim`) whose state the engine can't gather: the first checkpoint stops the run.

    Adafactor, all of bitsandbytes' and torchao's under FSDP1, Adagrad, GaLore and GrokAdamW under FSDP2. Not with
    `--save_only_model`.
    """
    if str(subject.arg("save_strategy")).lower() != "no":
        names = combinations.names_about("optimizer", "stops when it saves")
        yield from combined(subject, "fsdp_config.fsdp_version", *names)


@rule("AF606", "warning", pains=("P81",))
def precision_differs(subject: Subject) -> Iterator[Finding]:
    """`--bf16` or `--fp16` beside a different `mixed_precision` in the YAML: the argument wins."""
    precision = next((name for name in ("bf16", "fp16") if subject.arg_on(name)), None)
    written = subject.values.get("mixed_precision")
    if precision and written is not None and str(written).lower() != precision:
        yield Finding(
            "mixed_precision",
            f"--{precision} wins over mixed_precision: {written}",
            "the file doesn't say what is trained",
            f"mixed_precision: {precision}, or drop --{precision}",
        )


@rule("AF607", pains=("P51",))
def fsdp_in_the_arguments(subject: Subject) -> Iterator[Finding]:
    """`--fsdp` or `--fsdp_config` beside an FSDP YAML.

    The arguments win and most of the YAML is ignored, but leftovers leak: offload stays on, the state dict becomes
    FULL. The keys have other names in the arguments (`cpu_offload`), and unknown keys are dropped.
    """
    if subject.is_fsdp and (subject.arg("fsdp") or subject.arg("fsdp_config")):
        yield Finding(
            "fsdp_config", "the arguments set FSDP too", "most of this file is ignored", "drop --fsdp and --fsdp_config"
        )


@rule("AF608", pains=("P78",))
def model_only_checkpoints(subject: Subject) -> Iterator[Finding]:
    """`--save_only_model` under FSDP with SHARDED_STATE_DICT, or with `--load_best_model_at_end`: Trainer stops."""
    best = subject.arg_on("load_best_model_at_end")
    if subject.is_fsdp and subject.arg_on("save_only_model") and (best or subject.sharded_state_dict):
        yield Finding(
            "distributed_type" if best else "fsdp_config.fsdp_state_dict_type",
            f"--save_only_model {'excludes --load_best_model_at_end' if best else 'needs FULL_STATE_DICT'}",
            "Trainer stops",
            "drop --save_only_model",
        )


@rule("AF609", pains=("P61",))
def generating_under_fsdp1(subject: Subject) -> Iterator[Finding]:
    """`--predict_with_generate` under FSDP1: "'weight' must be 2-D"."""
    yield from combined(subject, "fsdp_config.fsdp_version", "generate-fsdp1")


@rule("AF610", pains=("P85",))
def dora_under_fsdp1(subject: Subject) -> Iterator[Finding]:
    """`--use_dora` under FSDP1: "IndexError: tuple index out of range"; or with `--expert_parallel_size`.

    transformers then shards the model, and the first step stops: "got mixed torch.Tensor and DTensor".
    """
    yield from combined(subject, "fsdp_config.fsdp_version", "dora-fsdp1", "dora-mesh")


@rule("AF611", pains=("P35",))
def eight_bit_base(subject: Subject) -> Iterator[Finding]:
    """`--load_in_8bit`, or a model in 8 bits (`--model`), under FSDP1: int8 can't be flattened with 16-bit weights."""
    yield from combined(subject, "distributed_type", "eight-bit-fsdp1")


@rule("AF612", "warning", pains=("P33", "P34"))
def four_bit_storage(subject: Subject) -> Iterator[Finding]:
    """`--load_in_4bit` under FSDP with the default storage, uint8.

    FSDP1 stops; FSDP2 leaves the 4-bit base unsharded, a full copy on each GPU. The storage must be a floating type,
    and the same as `mixed_precision`.
    """
    storage = str(subject.arg("bnb_4bit_quant_storage") or "uint8")
    dtype = TORCH_DTYPES.get(str(subject.top("mixed_precision")))
    if subject.is_fsdp and subject.arg_on("load_in_4bit") and storage != dtype:
        yield Finding(
            "mixed_precision",
            f"4-bit weights stored as {storage}",
            "they are not sharded, or FSDP stops",
            f"--bnb_4bit_quant_storage {dtype}",
        )


@rule("AF613", "warning", pains=("P14",))
def pure_low_precision(subject: Subject) -> Iterator[Finding]:
    """Full training of 16-bit weights without mixed precision: weights, gradients and moments stay in 16 bits.

    `--dtype` says so, or under FSDP the checkpoint (`--model`, `--args`), whose dtype transformers loads and nothing
    casts. train/sft.py loads float32 from such a checkpoint; most scripts don't.
    """
    is_off = subject.top("mixed_precision") in ("no", False, None) and not subject.arg_on("bf16", "fp16")
    dtype = subject.asked_dtype
    is_stated = dtype != "auto" or (subject.is_fsdp and subject.trains_everything)
    if is_off and is_stated and subject.load_dtype in LOW_DTYPES and not subject.uses_adapter:
        yield Finding(
            "mixed_precision",
            f"{f'a checkpoint in {subject.load_dtype}' if dtype == 'auto' else f'--dtype {dtype}'} "
            "without mixed precision has no float32 master weights",
            f"small updates are lost to rounding{UNLESS_SFT if dtype == 'auto' else ''}",
            "mixed_precision: bf16, or --dtype float32",
        )


@rule("AF614", pains=("P31",))
def accumulation_with_offload(subject: Subject) -> Iterator[Finding]:
    """FSDP1 with CPU offload, gradient accumulation and `sync_each_batch`: each micro-batch replaces the gradient."""
    steps = str(subject.arg("gradient_accumulation_steps") or 1)
    syncs = "sync_each_batch" in str(subject.arg("accelerator_config"))
    if subject.engine is Engine.FSDP1 and subject.on("fsdp_offload_params") and steps != "1" and syncs:
        yield Finding(
            "fsdp_config.fsdp_offload_params",
            "offload and sync_each_batch lose gradients",
            "each micro-batch replaces the one before",
            "fsdp_version: 2, or no sync_each_batch",
        )


@rule("AF630", pains=("P99",))
def labels_not_shifted(subject: Subject) -> Iterator[Finding]:
    """`--label_smoothing_factor` in full training under FSDP2: the model learns to repeat its input.

    FSDP2 renames the model's class, so Trainer no longer recognises a causal language model, and compares each token's
    logits with that token instead of the next. The logged loss looks better, and there is no warning. train/sft.py
    shifts the labels; other scripts don't.
    """
    yield from combined(subject, "fsdp_config.fsdp_version", "label-smoothing-fsdp2")
