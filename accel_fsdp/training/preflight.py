"""Checks between loading and `Accelerator.prepare`: refuses or fixes errors of an engine for a model."""

import os
from dataclasses import replace
from typing import Any

from torch import nn
from transformers import TrainingArguments

from accel_fsdp import console, models
from accel_fsdp.errors import UserError
from accel_fsdp.launch_environment import LaunchEnvironment
from accel_fsdp.models import check_layer_classes


def before_trainer(model: nn.Module, args: TrainingArguments) -> None:
    """Refuses what would stop later or train something else, and settles which kind of checkpointing runs."""
    check_wrap_classes(model)
    check_buffers(model)
    check_weight_decay(args)
    check_gathering(args)
    settle_checkpointing(model, args)


def check_wrap_classes(model: nn.Module) -> None:
    """Checks the names that Accelerate will look for, before Trainer creates its output folder.

    Without names in the YAML they are the model's `_no_split_modules`; if that is empty too, Accelerate silently wraps
    nothing.
    """
    launch = LaunchEnvironment.now()
    if not launch.wraps_layer_classes:
        return
    names = launch.layer_classes or tuple(getattr(model, "_no_split_modules", None) or ())
    layer_names = ", ".join(layer.name for layer in models.wrap_classes(model))
    if not names:
        raise UserError(
            "the YAML names no transformer layer class, and the model doesn't either",
            why="FSDP would make one unit of the whole model and save no memory",
            fix=f"fsdp_transformer_layer_cls_to_wrap: {layer_names or 'NAME'}",
        )
    check_layer_classes(names, models.class_names(model))


def check_buffers(model: nn.Module) -> None:
    """Refuses buffers with which accelerate 1.15 fails: its FSDP2 loading treats all of a state dict as DTensors."""
    launch = LaunchEnvironment.now()
    stored = models.persistent_buffers(model)
    if launch.uses_fsdp2 and launch.loads_on_rank_zero and stored:
        raise UserError(
            f"the model stores {stored} buffers, and the YAML asks FSDP2 for RAM-efficient loading",
            why="accelerate 1.15 stops at prepare: 'Tensor' object has no attribute 'device_mesh'",
            fix="fsdp_cpu_ram_efficient_loading: false in the YAML",
        )


def check_weight_decay(args: TrainingArguments) -> None:
    """Refuses flattened parameters of FSDP1: they lose the names by which Trainer exempts norms from decay."""
    launch = LaunchEnvironment.now()
    if launch.uses_fsdp1 and not launch.keeps_original_parameters and args.weight_decay > 0:
        raise UserError(
            f"fsdp_use_orig_params: false with --weight_decay {args.weight_decay}",
            why="norms and biases would be decayed too: in FSDP1's flat parameters they can't be distinguished",
            fix="fsdp_use_orig_params: true in the YAML",
        )


def check_gathering(args: TrainingArguments) -> None:
    """Refuses a run whose model could not be gathered at the end, or would be saved in an unexpected place."""
    plugin = getattr(args, "deepspeed_plugin", None)
    section = plugin.deepspeed_config.get("zero_optimization", {}) if plugin is not None else {}
    if section.get("stage") == 3 and not section.get("stage3_gather_16bit_weights_on_model_save"):
        raise UserError(
            "ZeRO-3 without zero3_save_16bit_model",
            why="the model could not be saved at the end: every rank keeps its own part of each weight",
            fix="zero3_save_16bit_model: true in the YAML (in DeepSpeed's own file: "
            "stage3_gather_16bit_weights_on_model_save)",
        )
    if args.save_on_each_node and (LaunchEnvironment.now().uses_fsdp or plugin is not None):
        raise UserError(
            "--save_on_each_node with a sharded model",
            why="a checkpoint is complete only with the shards of all nodes in one folder",
            fix="leave it out, with --output_dir on a disk that all nodes share",
        )


def settle_checkpointing(model: nn.Module, args: TrainingArguments) -> None:
    """Decides which library recomputes activations, and how; logs differences from the YAML or arguments.

    FSDP's own (the YAML's `fsdp_activation_checkpointing`) and the layers' (`--gradient_checkpointing`) exclude each
    other. It is non-reentrant wherever that works: the reentrant kind gives frozen layers no gradient unless their
    inputs require one, and DDP counts such parameters twice. Under ZeRO-3 it must be reentrant: the other kind compares
    saved and recomputed shapes, and finds partitioned weights.

    Both names are set: transformers 5.23 reads `activation_checkpointing`, 5.17 the other, which all versions mirror.
    """
    launch = LaunchEnvironment.now()
    of_fsdp = launch.uses_fsdp and launch.recomputes_units
    if of_fsdp and launch.by_transformers:
        args.gradient_checkpointing = args.activation_checkpointing = True
        _log(args, "checkpointing: the layers' own, as transformers shards the model")
    elif of_fsdp and launch.uses_fsdp2 and _drops_out(model):
        os.environ["FSDP_ACTIVATION_CHECKPOINTING"] = "false"
        os.environ["FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD"] = "false"  # which Accelerate refuses without the other
        args.gradient_checkpointing = args.activation_checkpointing = True
        _log(args, "checkpointing: the layers' own, as accelerate 1.15 under FSDP2 repeats dropout with other numbers")
    elif of_fsdp and args.gradient_checkpointing:
        args.gradient_checkpointing = args.activation_checkpointing = False
        _log(args, "checkpointing: FSDP's own, as the YAML says; --gradient_checkpointing adds nothing to it")
    if args.gradient_checkpointing:
        _choose_kind(model, args)


def _choose_kind(model: Any, args: TrainingArguments) -> None:
    options = dict(args.gradient_checkpointing_kwargs or {})
    plugin = getattr(args, "deepspeed_plugin", None)
    options.setdefault("use_reentrant", plugin is not None and plugin.zero_stage == 3)
    args.gradient_checkpointing_kwargs = args.activation_checkpointing_kwargs = options
    if options["use_reentrant"] and hasattr(model, "peft_config"):
        model.enable_input_require_grads()


def _drops_out(model: nn.Module) -> bool:
    settings = getattr(model, "config", None)
    in_config = vars(settings).items() if settings is not None else ()
    functional = any(value for name, value in in_config if ("drop" in name) and isinstance(value, float))
    return functional or any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())


def _log(args: TrainingArguments, line: str) -> None:
    if args.process_index == 0:
        console.say(line, style="yellow")


def keep_precision(plugin: Any) -> None:
    """Keeps in float32 what mixed precision would round to 16 bits: FSDP1's buffers, and FSDP2's loss.

    accelerate 1.15 gives FSDP1's policy the parameters' dtype for buffers, the angles of rotary embeddings among them,
    and FSDP2's policy for outputs: near 6, a loss in bfloat16 has steps of 1/32. No YAML key changes either. It takes
    no extra memory: Accelerate converts the logits to float32 before FSDP2 would cast them back, and the plan counts
    that copy.
    """
    policy = getattr(plugin, "mixed_precision_policy", None)
    if policy is None:
        return
    if plugin.fsdp_version == 1:
        policy.buffer_dtype = None
    else:
        plugin.mixed_precision_policy = replace(policy, output_dtype=None)
