"""Copies models, and their buffers, before they are sharded; finds hooks that a script adds."""

import copy
import gc
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from accel_fsdp.errors import in_a_line
from accel_fsdp.launch_environment import LaunchEnvironment
from accel_fsdp.ranks.holding import plain_class, unwrapped, user_name
from accel_fsdp.units import kib_or_mib

if TYPE_CHECKING:
    import torch
    from torch import nn

MOST_BYTES = 2**29
"""The largest model that is copied: a rank keeps several copies of its part, and rank 0 two of the whole model."""
OF_TRANSFORMERS = ("transformers.", "accel_fsdp.training.")
"""Modules whose hooks on weights keep the ranks of a mesh equal to one process."""


Buffers: TypeAlias = "dict[str, torch.Tensor]"
"""A forward pass may depend on buffers that a model changes itself, such as a codebook's entries."""


@dataclass
class Copy:
    """A copy of a model from before it was sharded, with its number of hooks and its buffers then.

    `plain` is None on ranks other than 0, and if there is a reason in `why`.
    """

    plain: "nn.Module | None"
    why: str
    hooks: int
    buffers: Buffers


def outermost(module: "nn.Module") -> "nn.Module":
    """The model that a module is a part of, or itself."""
    from torch import nn

    modules = [item for item in gc.get_objects() if issubclass(type(item), nn.Module) and "_modules" in vars(item)]
    holders = [holder for holder in modules if any(inner is module for inner in holder.modules())]
    return max(holders, key=lambda holder: sum(1 for _ in holder.modules()), default=module)


def copied(model: "nn.Module") -> Copy:
    first = {name: buffer.detach().cpu().clone() for name, buffer in _named(model) if not buffer.is_meta}
    return Copy(*_plain(model), hooks_of(model), first)


def _plain(model: "nn.Module") -> "tuple[nn.Module | None, str]":
    if LaunchEnvironment.now().rank != 0:
        return None, ""
    is_in_shards = loaded_in_shards(model)
    size_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    if size_bytes > MOST_BYTES:
        return None, f"the model has more than {kib_or_mib(MOST_BYTES)}"
    if not is_in_shards and any(parameter.is_meta for parameter in model.parameters()):
        return None, "the model had no values when it was sharded"
    try:
        return _rebuilt(model) if is_in_shards else copy.deepcopy(model), ""
    except Exception as error:  # any error of the model's own code
        return None, f"the model can't be copied: {in_a_line(error)}"


def hooks_of(model: "nn.Module") -> int:
    """The number of hooks on a model's modules that may change what it computes, without those of libraries.

    Transformers' keep hidden states, and are added in a forward pass that is asked for them.
    """
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooks = [hook for module in model.modules() for kind in kinds for hook in getattr(module, kind).values()]
    functions = [inspect.unwrap(getattr(hook, "func", hook)) for hook in hooks]
    libraries = ("torch.", "deepspeed.", *OF_TRANSFORMERS)
    return sum(not str(getattr(function, "__module__", "")).startswith(libraries) for function in functions)


def has_hooks(weight: Any) -> bool:
    """Whether a script's hook changes this weight's gradient; transformers' hooks average or sum it over ranks."""
    kinds = (weight._backward_hooks, getattr(weight, "_post_accumulate_grad_hooks", None))
    hooks = [hook for of_kind in kinds for hook in (of_kind or {}).values()]
    return any(not str(getattr(hook, "__module__", "")).startswith(OF_TRANSFORMERS) for hook in hooks)


def loaded_in_shards(model: Any) -> bool:
    """Whether transformers has loaded a model in shards, as for tensor and expert parallelism."""
    launch = LaunchEnvironment.now()
    return launch.by_transformers and any(hasattr(parameter, "placements") for parameter in model.parameters())


def _rebuilt(model: Any) -> Any:
    """A plain model of the same config, adapters and dtypes, without the weights, which are in a recorded update."""
    import torch
    from transformers.initialization import no_init_weights

    base = model.get_base_model() if (adapters := getattr(model, "peft_config", None)) else model
    config = copy.deepcopy(base.config)
    vars(config).pop("distributed_config", None)
    with torch.random.fork_rng(devices=[]), no_init_weights():
        plain = plain_class(base)._from_config(config, dtype=base.dtype)
        plain.tie_weights()
        if adapters:
            from peft import get_peft_model

            plain = get_peft_model(plain, copy.deepcopy(next(iter(adapters.values()))))
    with torch.no_grad():
        dtypes = {name: weight.dtype for name, weight in model.named_parameters()}
        for name, weight in plain.named_parameters():
            weight.data = weight.data.to(dtypes[name])
        buffers = dict(model.named_buffers())
        for name, buffer in plain.named_buffers():
            buffer.copy_(buffers[name])
    return plain


def changed_buffers(module: "nn.Module", prefix: str, first: Buffers) -> "Buffers | None":
    """The buffers of a module that is about to run, without those that have their `first` values.

    None if DDP replaces them by rank 0's before the forward pass. FSDP may have cast them.
    """
    is_sent = getattr(module, "broadcast_buffers", False) and module.require_forward_param_sync
    if is_sent and LaunchEnvironment.now().rank:
        return None
    now = {f"{prefix}.{name}".lstrip("."): buffer for name, buffer in _named(unwrapped(module))}
    known = ((name, buffer.detach().cpu(), first[name]) for name, buffer in now.items() if name in first)
    return {name: buffer.clone() for name, buffer, begun in known if not buffer.equal(begun.to(buffer.dtype))}


def restore_buffers(model: "nn.Module", first: Buffers, changed: Buffers) -> None:
    for name, buffer in _named(model):
        if name in first:
            buffer.data = changed.get(name, first[name]).to(buffer.dtype).clone()


def _named(model: "nn.Module") -> Iterator[tuple[str, Any]]:
    return ((user_name(name), buffer) for name, buffer in model.named_buffers())
