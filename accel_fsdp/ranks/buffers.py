"""A model's buffers: a forward pass may depend on those that it changes itself, such as a codebook's entries."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

from accel_fsdp.launch_environment import LaunchEnvironment
from accel_fsdp.ranks.holding import unwrapped, user_name

if TYPE_CHECKING:
    import torch
    from torch import nn

Buffers: TypeAlias = "dict[str, torch.Tensor]"


def copied(model: "nn.Module") -> Buffers:
    return {name: buffer.detach().cpu().clone() for name, buffer in _named(model) if not buffer.is_meta}


def changed(module: "nn.Module", prefix: str, first: Buffers) -> "Buffers | None":
    """The buffers of a module that is about to run, without those that have their `first` values.

    None if DDP replaces them by rank 0's before the forward pass. FSDP may have cast them.
    """
    is_sent = getattr(module, "broadcast_buffers", False) and module.require_forward_param_sync
    if is_sent and LaunchEnvironment.now().rank:
        return None
    now = {f"{prefix}.{name}".lstrip("."): buffer for name, buffer in _named(unwrapped(module))}
    known = ((name, buffer.detach().cpu(), first[name]) for name, buffer in now.items() if name in first)
    return {name: buffer.clone() for name, buffer, begun in known if not buffer.equal(begun.to(buffer.dtype))}


def restore(model: "nn.Module", first: Buffers, changed: Buffers) -> None:
    for name, buffer in _named(model):
        if name in first:
            buffer.data = changed.get(name, first[name]).to(buffer.dtype).clone()


def _named(model: "nn.Module") -> Iterator[tuple[str, Any]]:
    return ((user_name(name), buffer) for name, buffer in model.named_buffers())
