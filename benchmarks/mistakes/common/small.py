"""What the scripts share: a tiny model, rows that differ in content, the ways to wrap and to train."""

from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.data import DataLoader, DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 4, "vocab_size": 256, "max_position_embeddings": 64}
TOKENS = torch.randint(0, 256, (32, 16), generator=torch.Generator().manual_seed(1))
ROWS = [{"input_ids": row, "labels": row} for row in TOKENS]


def model(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """A Llama of 37,000 weights, the same on each rank."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**(SIZES | {"use_cache": False} | changes)))


def loader(rows: Any = ROWS, **options: Any) -> "DataLoader[Any]":
    """Batches of two rows, to be split by Accelerate."""
    return DataLoader(rows, batch_size=2, shuffle=True, **options)


def accelerated(**options: Any) -> Any:
    """Accelerator, and what it prepared: the model, its optimizer and the rows."""
    accelerator = Accelerator(**options)
    whole = model()
    return accelerator, *accelerator.prepare(whole, torch.optim.AdamW(whole.parameters(), lr=1e-3), loader())


def train(accelerator: Any, model: Any, optimizer: Any, batches: Any) -> None:
    """One epoch, without a mistake."""
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()


def start() -> tuple[int, int]:
    """This rank and the number of ranks."""
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def split() -> "DataLoader[Any]":
    """Batches of two rows, of which each rank has its own."""
    return DataLoader(ROWS, batch_size=2, sampler=DistributedSampler(ROWS, seed=3))


def steps(model: Any, optimizer: Any, batches: Any) -> None:
    """One epoch without Accelerate, without a mistake."""
    for batch in batches:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def fsdp1(whole: nn.Module, **options: Any) -> Any:
    """Each layer and the root in a unit of FSDP1."""
    layers = {type(layer) for layer in whole.get_submodule("model.layers")}  # type: ignore[union-attr]
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    return FullyShardedDataParallel(
        whole, auto_wrap_policy=ModuleWrapPolicy(layers), device_id=torch.device("cpu"), **options
    )


def fsdp2(whole: nn.Module) -> Any:
    """Each layer and the root in a unit of FSDP2, on the CPU."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in whole.get_submodule("model.layers"):  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh)
    return fully_shard(whole, mesh=mesh)
