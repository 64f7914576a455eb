"""Gradients under tensor parallelism that transformers gets wrong."""

from functools import cache
from typing import Any

from accel_fsdp.library_internals import Internal, patch

WRONG = "gradients of norms between split layers would be wrong after the first micro-batch of a step"


@cache
def enable() -> None:
    """Makes transformers' tensor parallelism train right. Idempotent."""
    sum_new_gradients()


@patch(
    Internal(
        "transformers.distributed.tensor_parallel:ReplicatedWithGradAllReduce.install_forward", "self module mesh"
    ),
    why=WRONG,
)
def sum_new_gradients() -> None:
    """Norms of a rank's own heads, such as Qwen3's q_norm, sum their gradients over the ranks after each micro-batch.

    transformers 5.23 sums what has been accumulated, earlier micro-batches once more with each. A hook on the gradient
    sees the new one alone.
    """
    import torch
    import torch.distributed as dist
    from transformers.distributed.tensor_parallel import ReplicatedWithGradAllReduce

    def install_forward(self: Any, module: Any, mesh: Any) -> Any:
        forward, hooked = module.forward, dict[str, Any]()

        def summed(gradient: Any) -> Any:
            gradient = gradient.contiguous().clone()
            dist.all_reduce(gradient, group=mesh.get_group())
            return gradient

        def with_hooks(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                for name, parameter in module.named_parameters(recurse=False):
                    if parameter.requires_grad and hooked.get(name) is not parameter:
                        parameter.register_hook(summed)
                        hooked[name] = parameter
            return forward(*args, **kwargs)

        module.forward = with_hooks
        return module

    ReplicatedWithGradAllReduce.install_forward = install_forward
