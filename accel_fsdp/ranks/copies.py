"""Copies models, and their buffers, before they are sharded."""

import copy
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from accel_fsdp.errors import in_a_line
from accel_fsdp.launch_environment import LaunchEnvironment
from accel_fsdp.ranks.holding import plain_class, unwrapped, user_name
from accel_fsdp.ranks.hooks import hooks_of
from accel_fsdp.units import kib_or_mib

if TYPE_CHECKING:
    import torch
    from torch import nn

MOST_BYTES = 2**29
"""The largest model that is copied: a rank keeps several copies of its part, and rank 0 two of the whole model."""


Buffers: TypeAlias = "dict[str, torch.Tensor]"
"""A forward pass may depend on buffers that a model changes itself, such as a codebook's entries."""


@dataclass
class Copy:
    """A copy of a model from before it was sharded, and its number of hooks then.

    `plain` is None on ranks other than 0, and if there is a reason in `why`.
    """

    plain: "nn.Module | None"
    hooks: int
    why: str = ""


def outermost(module: "nn.Module") -> "nn.Module":
    """The model that a module is a part of, or itself."""
    from torch import nn

    modules = [item for item in gc.get_objects() if issubclass(type(item), nn.Module) and "_modules" in vars(item)]
    holders = [holder for holder in modules if any(inner is module for inner in holder.modules())]
    return max(holders, key=lambda holder: sum(1 for _ in holder.modules()), default=module)


def copied(model: "nn.Module") -> Copy:
    hooks = hooks_of(model)
    if LaunchEnvironment.now().rank != 0:
        return Copy(None, hooks)
    size_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    if size_bytes > MOST_BYTES:
        return Copy(None, hooks, f"the model has more than {kib_or_mib(MOST_BYTES)}")
    is_in_shards = loaded_in_shards(model)
    if not is_in_shards and any(parameter.is_meta for parameter in model.parameters()):
        return Copy(None, hooks, "the model had no values when it was sharded")
    try:
        return Copy(_rebuilt(model) if is_in_shards else copy.deepcopy(model), hooks)
    except Exception as error:  # any error of the model's own code
        return Copy(None, hooks, f"the model can't be copied: {in_a_line(error)}")


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


def buffers_of(model: "nn.Module") -> Buffers:
    return {name: buffer.detach().cpu().clone() for name, buffer in _named(model) if not buffer.is_meta}


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
