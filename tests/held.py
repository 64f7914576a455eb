"""One rank of `test_states.py`: trains one step per setting and prints the bytes of storage that the rank then holds.

Reads torch's storages and nothing of the planner. Rank 0 prints `HELD {setting: {parameters, gradients, optimizer}}`.
"""

import json
import os
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from upstream_probe import V1, V2, llama, local, lora, prepared, rank, step

from accel_fsdp.ranks import cpu

ODD = {"vocab_size": 67, "hidden_size": 18, "intermediate_size": 37, "num_attention_heads": 3, "num_key_value_heads": 1}
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")


def settings() -> dict[str, tuple[dict[str, Any] | None, bool]]:
    """By name: the FSDP settings, None for DDP, and whether adapters are trained."""
    ranks = int(os.environ["WORLD_SIZE"])
    layouts: dict[str, tuple[dict[str, Any] | None, bool]] = {"ddp": (None, False)}
    for number, name in enumerate(STRATEGIES, start=1):
        layouts[f"fsdp1 {number}"] = ({**V1, "fsdp_sharding_strategy": name}, False)
    for number in (1, 2):
        layouts[f"fsdp2 {number}"] = ({**V2, "fsdp_reshard_after_forward": number == 1}, False)
    layouts["fsdp2 1 lora"] = (V2, True)
    assert ranks in (2, 4)
    return layouts


def storages(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of all different storages behind the tensors of this rank."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in map(local, tensors)
    }
    return sum(storages.values())


def held(fsdp: dict[str, Any] | None, adapters: bool) -> dict[str, int]:
    model = lora(llama(**ODD), target_modules="all-linear") if adapters else llama(**ODD)
    if fsdp:
        _, model, optimizer = prepared(model, fsdp)
    else:
        model = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    flat = [module._handle.flat_param for module in FullyShardedDataParallel.fsdp_modules(model)]
    parameters = flat or list(model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    state = [value for tensor in optimizer.state.values() for value in tensor.values() if value.dim()]
    return {"parameters": storages(parameters), "gradients": storages(gradients), "optimizer": storages(state)}


if __name__ == "__main__":
    cpu.enable()
    cpu.init_process_group(60)
    seen = {name: held(*how) for name, how in settings().items()}
    if rank() == 0:
        print("HELD " + json.dumps(seen), flush=True)
