"""Adapters of LoRA merged into their base by PEFT, one layer after another, so that memory holds one layer.

The layers are those of the model that PEFT builds for the adapter's settings; each gets its weights in float32 and
merges them itself, whatever its kind: Linear, Conv1D, embeddings, DoRA, rows of tokens.
"""

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accel_fsdp.checkpoints import LORA, TOKENS, Stored, file_names, plain, short_name, tensor_names
from accel_fsdp.errors import UserError, first_line
from accel_fsdp.exporter import transformers_probe
from accel_fsdp.models import remote_code

if TYPE_CHECKING:
    from peft import PeftModel

KNOWN = (
    *("peft_type", "peft_version", "task_type", "base_model_name_or_path", "revision", "auto_mapping"),
    *("inference_mode", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora"),
    *("fan_in_fan_out", "lora_dropout", "init_lora_weights", "target_modules", "exclude_modules"),
    *("modules_to_save", "layers_to_transform", "layers_pattern", "trainable_token_indices"),
    *("runtime_config", "megatron_core", "qalora_group_size"),
    *("eva_config", "corda_config", "lora_ga_config", "loftq_config"),  # settings of initialisations: see HARMLESS
)
"""The settings of LoRA that are merged here, or that don't change a merge. Any other enabled setting is refused."""
HARMLESS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
"""Initialisations that leave the base as it was."""

ELSEWHERE = (
    *("init_lora_weights", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "monteclora_config"),
    *("megatron_config", "megatron_core", "runtime_config", "auto_mapping", "base_model_name_or_path", "revision"),
)
"""Settings of an adapter's first weights, and of where its code and its base are."""


def adapted(settings: Mapping[str, Any], base: Path) -> "PeftModel":
    """The model of `base` with an adapter of these settings, on the meta device."""
    from peft import PeftConfig, get_peft_model

    if settings.get("megatron_config"):
        raise remote_code.NeedsCode(
            f"the settings of the adapter name a module of Python, megatron_core: {settings.get('megatron_core')}",
            why="PEFT would import it, and no command runs code that comes with a model",
            fix="export the adapter with the Megatron that trained it",
        )
    model = transformers_probe.build(base)
    try:
        config = PeftConfig.from_peft_type(**{key: value for key, value in settings.items() if key not in ELSEWHERE})
        with torch.device("meta"):
            wrapped = get_peft_model(model, config)
    except Exception as error:  # PEFT raises many kinds of errors for settings that were edited by hand
        raise UserError(
            f"PEFT can't build the adapter: {first_line(error)}",
            why="the tensors that the file must hold are unknown",
            fix=transformers_probe.FIX_CONFIG,
        ) from error
    if getattr(config, "target_parameters", None) and not settings.get("target_parameters"):
        raise UserError(
            "the adapter holds matrices of single experts, which transformers 5 holds in one tensor",
            why="PEFT converts such an adapter when it loads it, and the export doesn't",
            fix="load it with PEFT, and merge_and_unload() or save_pretrained it",
        )
    return wrapped


def merged(
    base: Mapping[str, Stored],
    adapter: Mapping[str, Stored],
    model: "PeftModel",
    filed_as: Mapping[str, str] | None = None,
) -> dict[str, Stored]:
    """The base with all of an adapter's changes; changed weights are in float32, to be rounded once.

    `model`: what PEFT builds for both. `filed_as`: the names of the model's tensors in the base's files.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    tensors = dict(base)
    for name, tensor in adapter.items():
        if not LORA.search(name) and TOKENS not in name:  # trained as a whole
            tensors[_named(plain(name), tensors, filed_as)] = tensor
    for name, layer in model.named_modules():
        own = {key: filed for key in layer.state_dict() if (filed := tensor_names.filed(f"{name}.{key}")) in adapter}
        if isinstance(layer, BaseTunerLayer) and own:
            target = _named(plain(f"{name}.base_layer.weight"), tensors, filed_as)
            tensors[target] = _merged_weight(layer, target, tensors[target], {k: adapter[n] for k, n in own.items()})
    return tensors


def _named(name: str, tensors: Mapping[str, Stored], filed_as: Mapping[str, str] | None) -> str:
    """The name of a model's tensor in the base, whose files may use other names."""
    filed_name = name if filed_as is None else filed_as.get(name, name)
    if filed_as is not None and name not in filed_as and filed_name in tensors:
        raise _unmergeable(f"on {name}, which the model's files hold in another layout,")
    if filed_name not in tensors:
        raise _mismatch(f"{filed_name} is not in the base")
    return filed_name


def _merged_weight(layer: Any, target: str, base: Stored, own: Mapping[str, Stored]) -> Stored:
    """The weight of a layer that PEFT wraps; `own`: the adapter's tensors by their names in the layer."""
    if not base.dtype.is_floating_point:
        raise _mismatch(f"{target} has no floating-point dtype but {short_name(base.dtype)}")
    if base.shape != (shape := tuple(layer.get_base_layer().weight.shape)):
        raise _mismatch(f"{target} is {list(base.shape)} in the base and {list(shape)} in the model that was trained")

    def load() -> torch.Tensor:
        whole = copy.deepcopy(layer).to_empty(device="cpu")
        weight = whole.get_base_layer().weight
        with torch.no_grad():
            weight.copy_(base.load())
            whole.load_state_dict({key: tensor.load() for key, tensor in own.items()}, strict=False)
            whole.merge()
        merged: torch.Tensor = whole.get_base_layer().weight.detach()
        return merged

    return Stored(base.shape, torch.float32, load)


def check_saved(adapter: Mapping[str, Stored], model: "PeftModel") -> None:
    """Refuses an adapter that lacks tensors that PEFT creates for its settings, or holds others."""
    from peft import get_peft_model_state_dict

    # PEFT saves embeddings that were adapted
    needed, possible = (get_peft_model_state_dict(model, save_embedding_layers=also) for also in (False, True))
    if lacks := tensor_names.lacking(adapter, needed):
        raise _contradiction(f"lacks {lacks}, which {file_names.ADAPTER_CONFIG} asks for")
    for name, tensor in adapter.items():
        if name not in possible:
            what = f"LoRA matrices of {tensor_names.module_of(name)}" if LORA.search(name) else plain(name)
            raise _contradiction(f"holds {what}, and {file_names.ADAPTER_CONFIG} chooses other modules")
        if tensor.shape != (shape := tuple(possible[name].shape)):
            raise _mismatch(f"{name} is {list(tensor.shape)}, its settings and its base say {list(shape)}")


def check_ties(adapter: Mapping[str, Stored], ties: Iterable[tuple[str, ...]]) -> None:
    """Refuses an adapter that changes a tied weight, but for rows of tokens, which PEFT keeps tied."""
    changed = {f"{plain(LORA.split(f'{name}.')[0] + '.')}weight" for name in adapter if LORA.search(name)}
    changed |= {plain(name) for name in adapter if not LORA.search(name) and TOKENS not in name}
    for group in ties:
        if tied := [name for name in group if name in changed]:
            partner = next(name for name in group if name != tied[0])
            raise UserError(
                f"the adapter changes {tied[0]}, which the base ties to {partner}",
                why="PEFT trains them apart, and the export of a tied model would hold one weight for both",
                fix="untie the base: base = AutoModelForCausalLM.from_pretrained(BASE, tie_word_embeddings=False), "
                "base.get_output_embeddings().weight.data = base.get_input_embeddings().weight.data.clone(), "
                "base.save_pretrained(FOLDER), then --model FOLDER; or export the adapter without --merge-adapter",
            )


def check_settings(settings: Mapping[str, Any], trained_base: bool) -> None:
    """Refuses adapters that PEFT's layers don't merge one by one.

    `trained_base`: the base was saved with the adapter, after the adapter's initialisation changed it.
    """
    if settings.get("peft_type") != "LORA":
        raise _unmergeable(f"of kind {settings.get('peft_type')}")
    enabled = [key for key, value in settings.items() if value and (key, value) != ("bias", "none")]
    if unknown := [key for key in enabled if key not in KNOWN]:
        raise _unmergeable(f"with {unknown[0]}")
    start = settings.get("init_lora_weights", True)
    if start not in HARMLESS and not trained_base:  # its numbers are for a base that isn't in the model's own files
        raise _unmergeable(f"that began with init_lora_weights: {start}, which changes the base,")


def _unmergeable(what: str) -> UserError:
    return UserError(
        f"an adapter {what} can't be merged here",
        why="the merge changes more than one weight of a layer, or PEFT itself doesn't merge it",
        fix="export the adapter without --merge-adapter; then in Python: model = PeftModel.from_pretrained("
        "AutoModelForCausalLM.from_pretrained(BASE), OUT); model.merge_and_unload().save_pretrained(MERGED)",
    )


def _contradiction(what: str) -> UserError:
    return UserError(
        f"the adapter's file {what}",
        why="the file is incomplete or of another adapter, and PEFT would leave modules random",
        fix=f"copy {file_names.ADAPTER_CONFIG} and {file_names.ADAPTER} again, from one save_pretrained",
    )


def _mismatch(what: str) -> UserError:
    return UserError(
        f"the adapter doesn't fit its base: {what}",
        why="the merged weights would be wrong",
        fix="give the model that the adapter was trained on: --model ID_OR_FOLDER",
    )
