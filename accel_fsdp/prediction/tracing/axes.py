"""Divides a recorded model as transformers does, by tensor and expert parallelism, over ranks that don't exist.

The plans, hooks and collectives are transformers' own; a fake process group makes tensors of the right size and sends
nothing. Experts get as many tokens as they would if the router were even: real counts would have to be read from data.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.distributed.expert_parallel import (
    AllToAllEP,
    EPImplementationInterface,
    _AllToAllState,
    apply_expert_parallelism,
)
from transformers.distributed.tensor_parallel import apply_tensor_parallelism
from transformers.utils import logging

from accel_fsdp import library_internals
from accel_fsdp.library_internals import Internal
from accel_fsdp.prediction.memory import Variant
from accel_fsdp.prediction.tracing.cuda_emulation import Watch

RELIES_ON = (
    Internal(
        "torch.distributed.tensor._sharding_prop:ShardingPropagator._propagate_tensor_meta_non_cached", "self op_schema"
    ),
    Internal("torch.testing._internal.distributed.fake_pg:FakeStore"),
    Internal("transformers.distributed.expert_parallel:AllToAllEP._dispatch_tokens"),
    Internal("transformers.distributed.expert_parallel:_AllToAllState"),
    Internal("transformers:PreTrainedModel._resolve_parallel_plans", "self distributed_config"),
)
library_internals.check(*RELIES_ON, why="what a divided model allocates is recorded with it")
EVEN = "accel_fsdp_even"


class Axes:
    """The plans of one model on the ranks of a variant, by full names of modules and parameters."""

    def __init__(self, model: Any, variant: Variant) -> None:
        tensor, experts = variant.tensor, variant.experts
        rows = max(experts // tensor, 1)
        sizes = {"tp_size": tensor, "ep_size": experts, "fsdp_size": rows}
        verbosity = logging.get_verbosity()
        logging.set_verbosity_error()  # rules for layers that this model doesn't have
        try:
            self.tensor_plan, self.expert_plan, _ = model._resolve_parallel_plans(DistributedConfig(**sizes))
        finally:
            logging.set_verbosity(verbosity)
        self._config = model.config
        self._tensor_mesh = init_device_mesh("cpu", (rows, tensor), mesh_dim_names=("fsdp", "tp"))["tp"]
        shares = rows * tensor // experts
        self._expert_mesh = init_device_mesh("cpu", (shares, experts), mesh_dim_names=("efsdp", "ep"))["ep"]

    def divide(self, module: nn.Module, place: str = "") -> None:
        """Divides a module on the meta device, which is at `place` in the model, where it has plans."""
        names = {name for name, _ in (*module.named_modules(), *module.named_parameters())}
        start = f"{place}." if place else ""
        tensor, expert = (
            {short: style for name, style in plan.items() if (short := name.removeprefix(start)) in names}
            for plan in (self.tensor_plan, self.expert_plan)
        )
        module.__dict__["config"] = self._config  # multi-head latent attention asks for its sizes
        if tensor and self._tensor_mesh.size() > 1:
            apply_tensor_parallelism(module, self._tensor_mesh, tensor)
        if isinstance(module, PreTrainedModel):
            module.tie_weights()  # the head was a plain parameter beside its divided table
        if expert and self._expert_mesh.size() > 1:
            apply_expert_parallelism(module, self._expert_mesh, self._tensor_mesh, expert, EVEN)


@contextmanager
def ranks_for(variant: Variant) -> Iterator[None]:
    """A context with a fake process group of the variant's ranks, for recording a divided model."""
    ranks = max(variant.tensor, variant.experts)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    EPImplementationInterface.register(EVEN, EvenAllToAll)
    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def unseen(self: Any, op_schema: Any) -> Any:
        """Hides DTensor's first run of each operation on whole tensors, which finds the shape of the result."""
        with Watch.blind():
            return propagate(self, op_schema)

    ShardingPropagator._propagate_tensor_meta_non_cached = unseen  # type: ignore[method-assign]
    try:
        yield
    finally:
        ShardingPropagator._propagate_tensor_meta_non_cached = propagate  # type: ignore[method-assign]
        dist.destroy_process_group()


class EvenAllToAll(AllToAllEP):  # type: ignore[misc]
    """transformers' exchange of tokens, with equal parts instead of counts from the data."""

    def _dispatch_tokens(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
        from torch.distributed._functional_collectives import all_to_all_single_autograd

        count = hidden_states.size(0)
        if self.tp_mesh.size() > 1:
            hidden_states, top_k_index, top_k_weights = (
                DTensor.from_local(t, self.tp_mesh, [Replicate()], run_check=False)
                .redistribute(self.tp_mesh, [Shard(0)])
                .to_local()
                for t in (hidden_states, top_k_index, top_k_weights)
            )
        ranks, per_token = self.ep_mesh.size(), top_k_index.size(-1)
        chosen = top_k_index.reshape(-1)
        order = torch.argsort(chosen)
        sent = hidden_states[order // per_token]
        pairs = chosen.numel()
        sizes = [pairs // ranks + (rank < pairs % ranks) for rank in range(ranks)]
        received = all_to_all_single_autograd(sent, sizes, sizes, self.ep_mesh.get_group())
        local = torch.zeros(pairs, 1, dtype=torch.long)
        weights = torch.ones_like(local, dtype=received.dtype)
        return received, local, weights, _AllToAllState(top_k_weights, order, sizes, sizes, count)
