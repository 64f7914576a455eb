"""Facts about a model: bundled ones, or read from the model built on the meta device, without weights."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_fsdp.checkpoints import file_names, safetensors_header
from accel_fsdp.models import catalogue, config_json, layers, parallel_plans
from accel_fsdp.models.classes import auto_class, build
from accel_fsdp.models.facts import ModelFacts
from accel_fsdp.models.reading import read_config

if TYPE_CHECKING:
    from torch import nn

DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def read_model(name: str) -> ModelFacts:
    """The facts about a model: from the bundled catalogue, else built on the meta device from its config.

    `name` is a hub id or a local folder; a folder wins over a catalogue entry of the same name.

    Raises:
        UserError: there is no such folder or repository, or `build` refuses its config.
    """
    entry = None if os.path.exists(name) else catalogue.find(name)
    return entry or model_facts(name, read_config(name))


def model_facts(name: str, config: Any) -> ModelFacts:
    """Builds the model of a Transformers config on the meta device and looks at it."""
    model = build(name, config)
    with config_json.explained_errors(name):
        wrapped = layers.wrap_classes(model)
        reason = "found in the built model" if wrapped else "no repeated layer found: name the class"
        return ModelFacts(
            name=name,
            model_type=str(config.model_type),
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            wrap_classes=wrapped,
            wrap_reason=reason,
            classes=layers.class_names(model),
            largest_layer_parameters=max((layer.parameters for layer in wrapped), default=0),
            persistent_buffers=layers.persistent_buffers(model),
            auto_class=auto_class(config),
            language_parameters=layers.language_parameters(model),
            embeddings=layers.embeddings(model),
            scalars=any(parameter.dim() == 0 for parameter in model.parameters()),
            embedding_parents=layers.embedding_parents(model, [layer.name for layer in wrapped]),
            fused_experts=layers.fused_experts(model),
            **vars(parallel_plans.divisible_by_config(config)),
            **_formats(name, config, model),
        )


def _formats(name: str, config: Any, model: "nn.Module") -> dict[str, Any]:
    """Dtypes, ties, experts and quantisation, from the config and the headers of the weights."""
    stored = safetensors_header.weights_in(_local_folder(name))
    tied = bool(getattr(config, "tie_word_embeddings", False))
    declared = getattr(model, "_no_split_modules", None) or ()
    quantization = getattr(config, "quantization_config", None)
    bits, storage = _quantization(quantization)
    return {
        "dtype": _dtype(config, stored),
        "tied": tied,
        "tied_apart": tied and safetensors_header.is_tied_apart(stored),
        "kept_bf16": next(iter(layers.kept_in_float32(model, "bfloat16")), ""),
        "kept_fp16": next(iter(layers.kept_in_float32(model, "float16")), ""),
        "expert_classes": layers.expert_classes(model),
        "declared_classes": tuple(sorted(declared)),
        "quantized": bits,
        "quant_storage": storage,
        "quant_method": config_json.quant_method(quantization),
    }


def stored_dtype(name: str, revision: str = "main", run_code: bool = False) -> str:
    """The dtype of a model's files, such as bfloat16; empty if unknown."""
    return _dtype(read_config(name, revision, run_code), safetensors_header.weights_in(_local_folder(name)))


def _dtype(config: Any, stored: Mapping[str, safetensors_header.Tensor]) -> str:
    dtype = config.dtype or next((DTYPES[tensor.dtype] for tensor in stored.values() if tensor.dtype in DTYPES), "")
    return str(dtype).removeprefix("torch.")


def _local_folder(name: str) -> Path:
    """The folder of a model: as given, or in the hub's cache. Doesn't use the network."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(name, file_names.CONFIG)
    return Path(cached).parent if isinstance(cached, str) else Path(os.devnull)


def _quantization(settings: Any) -> tuple[int, str]:
    """Bits and storage dtype of a bitsandbytes checkpoint; 0 for other methods."""
    if settings is None:
        return 0, ""
    config = settings if isinstance(settings, dict) else settings.to_dict()
    bits = 4 if config.get("load_in_4bit") else 8 if config.get("load_in_8bit") else 0
    return bits, str(config.get("bnb_4bit_quant_storage") or "uint8") if bits == 4 else ""
