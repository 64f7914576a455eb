"""The model and tokenizer as `train/sft.py` loads them: explicit dtypes, adapters, checks before FSDP wraps them."""

import os
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from accel_fsdp import adapters, cpu, facts
from accel_fsdp.arguments import ModelArguments
from accel_fsdp.errors import UserError
from accel_fsdp.refusals import check_layer_classes

if TYPE_CHECKING:
    from torch import nn


def load_tokenizer(options: ModelArguments) -> PreTrainedTokenizerBase:
    """Loads the model's tokenizer; one without a padding token pads with its end-of-sequence token.

    Raises:
        UserError: the model or its tokenizer can't be read.
    """
    facts.read_config(options.model_name_or_path, options.model_revision)
    try:
        tokenizer = AutoTokenizer.from_pretrained(options.model_name_or_path, revision=options.model_revision)
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot load a tokenizer from {options.model_name_or_path}: {facts.first_line(error)}",
            why="the data can't be turned into tokens",
            fix="copy the tokenizer files of the base model into that folder",
        ) from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(options: ModelArguments) -> "nn.Module":
    """Loads the model on the CPU, with a LoRA adapter where asked for; `prepare` shards it later.

    Raises:
        UserError: the weights can't be read, or no module matches `lora_target_modules`.
    """
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(
            options.model_name_or_path,
            revision=options.model_revision,
            dtype=_dtype(options),
            attn_implementation=options.attn_implementation,
            quantization_config=_quantization(options),
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
        raise UserError(
            f"cannot load the weights of {options.model_name_or_path}: {facts.first_line(error)}",
            why="there is nothing to train",
            fix="check the name, or give a folder that save_pretrained wrote",
        ) from error
    if missing := sorted(loading["missing_keys"]):
        raise UserError(
            f"{options.model_name_or_path} lacks {len(missing)} weights of its model, first {missing[0]}",
            why="they would be trained from random values",
            fix="download or export the model again",
        )
    return _with_adapter(model, options) if options.use_peft else model


def _dtype(options: ModelArguments) -> str | torch.dtype:
    """Explicit, because a 16-bit checkpoint under `mixed_precision: 'no'` would train without fp32 master weights."""
    if options.dtype == "auto":
        return "auto" if options.use_peft else torch.float32
    dtype: torch.dtype = getattr(torch, options.dtype)
    return dtype


def _quantization(options: ModelArguments) -> Any:
    """4-bit weights packed in a floating dtype, the only kind that FSDP can shard; computed in that same dtype."""
    if not options.load_in_4bit:
        return None
    from transformers import BitsAndBytesConfig

    storage = getattr(torch, options.bnb_4bit_quant_storage)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=options.bnb_4bit_quant_type,
        bnb_4bit_quant_storage=storage,
        bnb_4bit_compute_dtype=storage if storage.is_floating_point else torch.bfloat16,
    )


def _with_adapter(model: Any, options: ModelArguments) -> "nn.Module":
    from peft import LoraConfig, get_peft_model

    adapters.enable()
    targets = options.lora_target_modules
    config = LoraConfig(
        r=options.lora_r,
        lora_alpha=options.lora_alpha,
        lora_dropout=options.lora_dropout,
        target_modules="all-linear" if targets == ["all-linear"] else targets,
        task_type="CAUSAL_LM",
    )
    try:
        adapted: nn.Module = get_peft_model(model, config)
    except ValueError as error:
        raise UserError(
            f"no adapter can be made: {facts.first_line(error)}",
            why="nothing would be trained",
            fix="--lora_target_modules all-linear, or names of linear modules such as q_proj v_proj",
        ) from error
    return adapted


def check_wrap_classes(model: "nn.Module") -> None:
    """Checks the names that Accelerate will look for, before Trainer creates its output folder.

    Without names in the YAML they are the model's `_no_split_modules`; with none there either, Accelerate wraps nothing
    and says nothing.
    """
    if not cpu.fsdp_requested() or os.environ.get("FSDP_AUTO_WRAP_POLICY", "").upper() != "TRANSFORMER_BASED_WRAP":
        return
    given = os.environ.get("FSDP_TRANSFORMER_CLS_TO_WRAP")
    names = given.split(",") if given else list(getattr(model, "_no_split_modules", None) or ())
    found = ", ".join(layer.name for layer in facts.wrap_classes(model))
    if not names:
        raise UserError(
            "the YAML names no transformer layer class, and the model doesn't either",
            why="FSDP would make one unit of the whole model and save no memory",
            fix=f"fsdp_transformer_layer_cls_to_wrap: {found or 'NAME'}",
        )
    check_layer_classes(tuple(names), facts.class_names(model))


def check_buffers(model: "nn.Module") -> None:
    """Stops before accelerate 1.15 would: its FSDP2 loading takes every entry of the state dict for a DTensor."""
    loading = os.environ.get("FSDP_CPU_RAM_EFFICIENT_LOADING", "").lower() == "true"
    stored = facts.persistent_buffers(model)
    if cpu.fsdp_requested() and os.environ.get("FSDP_VERSION") == "2" and loading and stored:
        raise UserError(
            f"the model stores {stored} buffers, and the YAML asks FSDP2 for RAM-efficient loading",
            why="accelerate 1.15 stops at prepare: 'Tensor' object has no attribute 'device_mesh'",
            fix="fsdp_cpu_ram_efficient_loading: false in the YAML",
        )
