"""Makes sharded checkpoints of random models as Accelerate writes them under FSDP2: of any ranks, in one process.

Each rank in turn joins a process group that only pretends to have peers, holds its shards as DTensors, and writes its
files through torch's own planner and writer; memory holds one rank's shards.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, LlamaConfig


def llama(size_gb: float, layers: int = 16) -> LlamaConfig:
    """A Llama whose float32 weights take about `size_gb` (10^9 bytes)."""
    vocab = 32000
    wanted = size_gb * 1e9 / 4
    hidden = 64 * round(((-2 * vocab + ((2 * vocab) ** 2 + 48 * layers * wanted) ** 0.5) / (24 * layers)) / 64)
    return LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )


def make(run: Path, config: LlamaConfig, ranks: int) -> Path:
    """Writes `run/checkpoint-1` with random float32 weights, and the model's config; returns the checkpoint."""
    folder = run / "checkpoint-1"
    inner = folder / "pytorch_model_fsdp_0"
    inner.mkdir(parents=True)
    config.save_pretrained(run / "model")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 1}))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    _save(inner, shapes, ranks)
    return folder


def _save(folder: Path, shapes: dict[str, torch.Size], ranks: int) -> None:
    writer = FileSystemWriter(folder)
    writer.set_up_storage_writer(True)
    plans = []
    for _, planner in _planners(shapes, ranks, real=False):
        plans.append(writer.prepare_local_plan(planner.create_local_plan()))
    plans, metadata = planner.create_global_plan(plans)
    plans = writer.prepare_global_plan(plans)
    results = []
    for rank, planner in _planners(shapes, ranks, real=True):
        planner.create_local_plan()
        results.append(writer.write_data(planner.finish_plan(plans[rank]), planner).wait())
    writer.finish(metadata, results)


def _planners(shapes: dict[str, torch.Size], ranks: int, real: bool) -> Iterator[tuple[int, DefaultSavePlanner]]:
    for rank in range(ranks):
        dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
        mesh = init_device_mesh("cpu", (ranks,))
        generator = torch.Generator().manual_seed(rank)
        state = {name: _shard(shape, rank, ranks, mesh, generator if real else None) for name, shape in shapes.items()}
        planner = DefaultSavePlanner()
        planner.set_up_planner({"model": state}, None, rank == 0)
        yield rank, planner
        dist.destroy_process_group()


def _shard(shape: torch.Size, rank: int, ranks: int, mesh: Any, generator: torch.Generator | None) -> DTensor:
    rows = -(-shape[0] // ranks)  # as torch.chunk
    mine = max(0, min(rows, shape[0] - rank * rows))
    local = torch.empty(mine, *shape[1:])
    if generator is not None:
        local.normal_(generator=generator)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
