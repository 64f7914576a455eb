"""Names of tensors: how wrappers change them, and how PEFT names the tensors of LoRA adapters.

Adapters are in a model, which may hold several, or in a separate file.
"""

import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

from accel_fsdp.units import counted, first_few

WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
"""The names under which FSDP1, activation checkpointing and torch.compile hold what they wrap."""
PEFT_PREFIX = "base_model.model."
LORA = re.compile(r"\.(lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector)(?:\.|$)")
TOKENS = ".token_adapter.trainable_tokens_delta"
"""The rows of an embedding that `trainable_token_indices` trains, behind the module's name."""
NAMED = (
    re.compile(r"(\.lora_[AB])\.([^.]+)(\.(?:weight|bias))$"),
    re.compile(r"(\.lora_embedding_[AB])\.([^.]+)()$"),
    re.compile(r"(\.lora_magnitude_vector)\.(?!weight$)([^.]+)(?:\.weight)?()$"),
    re.compile(r"(\.token_adapter\.trainable_tokens_delta)\.([^.]+)()$"),
)
SAVED = re.compile(r"\.modules_to_save\.([^.]+)\.")
LAYER = re.compile(r"\.\d+\.")
WRAPPED = re.compile(r"\.(?:token_adapter\.)?(?:(?:base_layer|original_module)\.)+")
UNDER = re.compile(r"\.base_layer(?=\.)")
T = TypeVar("T")
MODULES_SHOWN = 4


def clean_name(name: str) -> str:
    """The name of a module or parameter as it was before FSDP, activation checkpointing or torch.compile wrapped it."""
    for wrapper in WRAPPERS:
        name = name.replace(f"{wrapper}.", "")
    return name


def is_adapted(names: Iterable[str]) -> bool:
    return any(LORA.search(name) or TOKENS in name for name in names)


def divided(tensors: Mapping[str, T]) -> tuple[dict[str, T], dict[str, dict[str, T]]]:
    """The tensors of a model with adapters: its own by their plain names, and each adapter's as in PEFT's files.

    An adapter's name is empty where the tensors are already named as in files. Where only adapters were saved, a tensor
    that its name does not assign to one of them, such as `modules_to_save` in a file, belongs to each.
    """
    base: dict[str, T] = {}
    adapters: dict[str, dict[str, T]] = {}
    for name, tensor in tensors.items():
        adapter, tensor_name = _adapter_and_name(name)
        if adapter is None:
            base[name] = tensor
        else:
            adapters.setdefault(adapter, {})[_prefixed(tensor_name)] = tensor
    if not _is_whole(base, tensors):
        for tensors_of in adapters.values():
            tensors_of |= {_prefixed(name): tensor for name, tensor in base.items()}
        return {}, adapters
    return {plain(name): tensor for name, tensor in base.items()}, adapters


def module_of(tensor: str) -> str:
    """The plain name of the module that a tensor of LoRA belongs to."""
    return plain(f"{LORA.split(tensor)[0]}.").rstrip(".")


def lacking(names: Iterable[str], needed: Iterable[str]) -> str:
    """The needed tensors that an adapter lacks, as text, by their names in files; empty if it has all."""
    needed = set(needed)
    missing = needed.difference(names)
    modules = {module_of(name) for name in needed if LORA.search(name)}
    if broken := sorted({module_of(name) for name in missing if LORA.search(name)}):
        listed = first_few(broken, MODULES_SHOWN)
        return f"LoRA tensors of {len(broken)} of {counted(len(modules), 'module')} ({listed})"
    return plain(min(missing)) if missing else ""


def plain(name: str) -> str:
    return WRAPPED.sub(".", name).removeprefix(PEFT_PREFIX)


def filed(name: str) -> str:
    """The name in an adapter's file of a tensor of a model with that adapter, or of such a file."""
    return _prefixed(_adapter_and_name(clean_name(name))[1])


def _prefixed(name: str) -> str:
    """transformers' own `add_adapter` wraps modules, not the model."""
    return name if name.startswith("base_model.") else PEFT_PREFIX + name


def _is_whole(base: Mapping[str, T], tensors: Mapping[str, T]) -> bool:
    """Whether the tensors include the whole base: that of each adapted module, and layers without adapters.

    PEFT's files of adapted embeddings hold the embedding too.
    """
    adapted = {name[: match.start()] for name in tensors if (match := LORA.search(name))}
    modules = {name[: match.start()] for name in base for match in UNDER.finditer(name)}
    return adapted <= modules and any(LAYER.search(name) for name in base)


def _adapter_and_name(name: str) -> tuple[str | None, str]:
    """The adapter that a tensor belongs to, None for none, and its name in that adapter's file."""
    for pattern in NAMED:
        if match := pattern.search(name):
            return match[2], name[: match.start()] + match[1] + match[3]
    if match := SAVED.search(name):
        return match[1], SAVED.sub(".", name)
    return ("" if LORA.search(name) or name.endswith(TOKENS) else None), name
