"""How PEFT names the tensors of LoRA adapters: in a model, which may hold several, and in an adapter's own file."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

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


@dataclass(frozen=True)
class Divided(Generic[T]):
    """The tensors of a model with adapters: its own by their plain names, and each adapter's as in PEFT's files.

    An adapter's name is empty where the tensors are already named as in files.
    """

    base: dict[str, T]
    adapters: dict[str, dict[str, T]]


def is_adapted(names: Iterable[str]) -> bool:
    """Whether any of these names is of an adapter."""
    return any(LORA.search(name) or TOKENS in name for name in names)


def is_wrapped(names: Iterable[str]) -> bool:
    """Whether PEFT has wrapped a model with these names, for an adapter of whatever kind."""
    return any(name.startswith(PEFT_PREFIX) for name in names)


def divided(tensors: Mapping[str, T]) -> Divided[T]:
    """Takes base and adapters apart.

    Where the adapters alone were saved, what no name tells from their own, such as `modules_to_save` in a file, is of
    each of them.
    """
    base: dict[str, T] = {}
    adapters: dict[str, dict[str, T]] = {}
    for name, one in tensors.items():
        adapter, filed = _in_file(name)
        if adapter is None:
            base[name] = one
        else:
            adapters.setdefault(adapter, {})[_prefixed(filed)] = one
    if not _is_whole(base, tensors):
        for held in adapters.values():
            held |= {_prefixed(name): one for name, one in base.items()}
        return Divided({}, adapters)
    return Divided({plain(name): one for name, one in base.items()}, adapters)


def plain(name: str) -> str:
    """A tensor's name in the model without adapter."""
    return WRAPPED.sub(".", name).removeprefix(PEFT_PREFIX)


def _prefixed(name: str) -> str:
    """transformers' own `add_adapter` wraps modules, not the model."""
    return name if name.startswith("base_model.") else PEFT_PREFIX + name


def _is_whole(base: Mapping[str, T], tensors: Mapping[str, T]) -> bool:
    """Whether the base lies beside its adapters: under each adapted module, and in layers that have none.

    PEFT's files of adapted embeddings hold the embedding too.
    """
    adapted = {name[: found.start()] for name in tensors if (found := LORA.search(name))}
    under = {name[: found.start()] for name in base for found in UNDER.finditer(name)}
    return adapted <= under and any(LAYER.search(name) for name in base)


def _in_file(name: str) -> tuple[str | None, str]:
    """The adapter that a tensor belongs to, None for none, and its name in that adapter's file."""
    for pattern in NAMED:
        if found := pattern.search(name):
            return found[2], name[: found.start()] + found[1] + found[3]
    if found := SAVED.search(name):
        return found[1], SAVED.sub(".", name)
    return ("" if LORA.search(name) or name.endswith(TOKENS) else None), name
