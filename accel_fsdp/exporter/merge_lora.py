"""Adapters merged into their base: plain LoRA and rsLoRA tensor by tensor, W + scale * B A; any other kind by PEFT.

The formula is that of PEFT's `merge_and_unload` (peft 0.21, `tuners/lora/layer.py`), in float32.
"""

import copy
import math
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from accel_fsdp.checkpoints import (
    LORA,
    TOKENS,
    Stored,
    Weights,
    file_names,
    of_tensor,
    pattern_of,
    plain,
    safetensors_files,
    short_name,
    tensor_names,
)
from accel_fsdp.errors import UserError
from accel_fsdp.exporter import transformers_probe
from accel_fsdp.exporter.companion_files import CompanionFiles
from accel_fsdp.models import model_class, part_for, read_config

KNOWN = frozenset(
    {
        *("peft_type", "peft_version", "task_type", "base_model_name_or_path", "revision", "auto_mapping"),
        *("inference_mode", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora"),
        *("fan_in_fan_out", "lora_dropout", "init_lora_weights", "target_modules", "exclude_modules"),
        *("target_parameters", "modules_to_save", "layers_to_transform", "layers_pattern", "trainable_token_indices"),
        *("ensure_weight_tying", "runtime_config", "megatron_core", "qalora_group_size"),
        *("eva_config", "corda_config", "lora_ga_config", "loftq_config"),  # settings of initialisations: see HARMLESS
    }
)
"""The settings of LoRA that this merge supports, or that don't change it. Any other enabled setting is refused."""
HARMLESS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
"""Initialisations that leave the base as it was."""


def is_plain(adapter: Collection[str], settings: Mapping[str, Any]) -> bool:
    """Whether each change of the base is a product of two matrices, or a whole tensor."""
    if settings.get("use_dora") or settings.get("target_parameters"):
        return False
    return not any("lora_embedding_" in name or "lora_magnitude" in name or TOKENS in name for name in adapter)


def merged(
    base: Mapping[str, Stored],
    adapter: Mapping[str, Stored],
    settings: Mapping[str, Any],
    filed_as: Mapping[str, str] | None = None,
    turned: frozenset[str] | None = None,
) -> dict[str, Stored]:
    """The base with all of a plain adapter's changes; changed weights are in float32, to be rounded once.

    `filed_as`: the names of the model's tensors in the base's files. `turned`: the weights that are stored transposed,
    by the layer's kind; None if that depends on the settings alone.
    """
    tensors = dict(base)
    for name, tensor in adapter.items():
        if not LORA.search(name):  # trained as a whole
            tensors[_named(plain(name), tensors, filed_as)] = tensor
    for module in dict.fromkeys(LORA.split(name)[0] for name in adapter if LORA.search(name)):
        target = _named(f"{plain(f'{module}.')}weight", tensors, filed_as)
        tensors[target] = _merged_weight(module, target, tensors[target], adapter, settings, turned)
    return tensors


def _named(name: str, tensors: Mapping[str, Stored], filed_as: Mapping[str, str] | None) -> str:
    """The name of a model's tensor in the base, whose files may use other names."""
    filed_name = name if filed_as is None else filed_as.get(name, name)
    if filed_as is not None and name not in filed_as and filed_name in tensors:
        raise _unmergeable(f"on {name}, which the model's files hold in another layout,")
    if filed_name not in tensors:
        raise _mismatch(f"{filed_name} is not in the base")
    return filed_name


def _merged_weight(
    module: str,
    target: str,
    base: Stored,
    adapter: Mapping[str, Stored],
    settings: Mapping[str, Any],
    turned: frozenset[str] | None,
) -> Stored:
    down, up = (adapter.get(f"{module}.{name}.weight") for name in ("lora_A", "lora_B"))
    if down is None or up is None:
        raise _mismatch(f"one of the two matrices of {module} is missing")
    if not base.dtype.is_floating_point:
        raise _mismatch(f"{target} has no floating-point dtype but {short_name(base.dtype)}")
    name = tensor_names.module_of(f"{module}.lora_A")
    is_turned = bool(settings.get("fan_in_fan_out")) if turned is None else f"{name}.weight" in turned
    shape = (down.shape[1], up.shape[0]) if is_turned else (up.shape[0], down.shape[1])
    if base.shape != shape:
        raise _mismatch(f"{module} is {list(base.shape)} in the base and {list(shape)} in the adapter")
    rank = _setting_of(name, settings.get("rank_pattern"), settings.get("r", 8))
    if down.shape[0] != rank or not rank:
        raise _mismatch(f"{module} has rank {down.shape[0]}, its settings say {rank}")
    alpha = _setting_of(name, settings.get("alpha_pattern"), settings.get("lora_alpha", 8))
    if not isinstance(alpha, int | float):
        raise _mismatch(f"lora_alpha of {module} is {alpha}")
    scale = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)

    def load() -> torch.Tensor:
        product = up.load().float() @ down.load().float() * scale
        return product.T.contiguous().add_(base.load()) if is_turned else product.add_(base.load())

    return Stored(base.shape, torch.float32, load)


def by_peft(weights: Weights, companions: CompanionFiles) -> dict[str, Stored]:
    """The model with its adapter merged by PEFT, in float32 and whole in memory, by the names of the model's code."""
    from peft import get_peft_model, set_peft_model_state_dict

    config = read_config(str(companions.folder))
    kind = model_class(config)
    part = copy.deepcopy(part_for(kind, config))
    if weights.tensors:
        base = kind(part).float()
        base.load_state_dict({name: stored.load() for name, stored in weights.tensors.items()}, strict=False)
    else:
        state = {name: t.load() for name, t in safetensors_files.of_folder(companions.folder).items()}
        options = {"config": part, "state_dict": state, "dtype": torch.float32}
        base = kind.from_pretrained(None, trust_remote_code=False, **options)
    model = get_peft_model(base, transformers_probe.peft_settings(companions.settings))
    set_peft_model_state_dict(model, {name: stored.load() for name, stored in weights.adapter.items()})
    return {name: of_tensor(tensor) for name, tensor in model.merge_and_unload().state_dict().items()}


def check_saved(adapter: Collection[str], needed: Iterable[str], possible: Collection[str]) -> None:
    """Refuses an adapter that lacks tensors that PEFT creates for its settings, or holds matrices of other modules."""
    if lacks := tensor_names.lacking(adapter, needed):
        raise _contradiction(f"lacks {lacks}, which {file_names.ADAPTER_CONFIG} asks for")
    if unchosen := next((name for name in adapter if LORA.search(name) and name not in possible), None):
        module = tensor_names.module_of(unchosen)
        raise _contradiction(f"holds LoRA matrices of {module}, and {file_names.ADAPTER_CONFIG} chooses other modules")


def tied_once(
    adapter: Mapping[str, Stored], settings: Mapping[str, Any], ties: Iterable[tuple[str, ...]]
) -> dict[str, Stored]:
    """The adapter without the copies of weights that its settings keep tied (`ensure_weight_tying`).

    Otherwise PEFT trains one of the tied weights separately from the others; rows of tokens alone are always tied.

    Raises:
        UserError: the merged weights would differ, and a tied model stores them only once.
    """
    changed = {name: f"{plain(LORA.split(f'{name}.')[0] + '.')}weight" for name in adapter if LORA.search(name)}
    changed |= {name: plain(name) for name in adapter if not LORA.search(name) and TOKENS not in name}
    copies: set[str] = set()
    for group in ties:
        changed_names = [name for name in group if name in changed.values()]
        if changed_names and not settings.get("ensure_weight_tying"):
            partner = next(name for name in group if name != changed_names[0])
            raise UserError(
                f"the adapter changes {changed_names[0]}, which the base ties to {partner}",
                why="PEFT trains them apart, and the export of a tied model would hold one weight for both",
                fix="untie the base: base = AutoModelForCausalLM.from_pretrained(BASE, tie_word_embeddings=False), "
                "base.get_output_embeddings().weight.data = base.get_input_embeddings().weight.data.clone(), "
                "base.save_pretrained(FOLDER), then --model FOLDER; or export the adapter without --merge-adapter",
            )
        copies.update(changed_names[1:])
    return {name: tensor for name, tensor in adapter.items() if changed.get(name) not in copies}


def _setting_of(module: str, patterns: Mapping[str, Any] | None, default: Any) -> Any:
    """A setting of one module: by the first pattern that its name ends in, as PEFT matches them."""
    by_pattern = patterns if isinstance(patterns, dict) else {}
    return next((value for key, value in by_pattern.items() if re.fullmatch(pattern_of(key), module)), default)


def check_settings(settings: Mapping[str, Any], trained_base: bool) -> None:
    """Refuses adapters that these formulas don't cover.

    `trained_base`: the base was saved with the adapter, after the adapter's initialisation changed it.
    """
    if settings.get("peft_type") != "LORA":
        raise _unmergeable(f"of kind {settings.get('peft_type')}")
    others = {key: value for key, value in settings.items() if key not in KNOWN and value}
    unknown = [key for key, value in others.items() if (key, value) != ("bias", "none")]
    if unknown:
        raise _unmergeable(f"with {unknown[0]}")
    start = settings.get("init_lora_weights", True)
    if start not in HARMLESS and not trained_base:
        raise UserError(
            f"the adapter began with init_lora_weights: {start}, which changes the base",
            why="its numbers are for the changed base, which is not in the checkpoint; in the model's own files they "
            "would be wrong",
            fix="in the training script: save_pretrained(FOLDER, path_initial_model_for_weight_conversion=START), "
            "and export that; START is the adapter as it was saved before the first step",
        )


def _unmergeable(what: str) -> UserError:
    return UserError(
        f"an adapter {what} can't be merged here",
        why="the merge isn't the sum of its base and a product, or PEFT itself doesn't merge it",
        fix="export the adapter without --merge-adapter; then in Python: model = PeftModel.from_pretrained("
        "AutoModelForCausalLM.from_pretrained(BASE), OUT); model.merge_and_unload().save_pretrained(MERGED)",
    )


def _contradiction(what: str) -> UserError:
    return UserError(
        f"the adapter's file {what}",
        why="the file is incomplete or of another adapter, and the merge would not be the model that was trained",
        fix=f"copy {file_names.ADAPTER_CONFIG} and {file_names.ADAPTER} again, from one save_pretrained",
    )


def _mismatch(what: str) -> UserError:
    return UserError(
        f"the adapter doesn't fit its base: {what}",
        why="the merged weights would be wrong",
        fix="give the model that the adapter was trained on: --model ID_OR_FOLDER",
    )
