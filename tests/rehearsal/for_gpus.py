"""A script of plain PyTorch as people write it for GPUs, `for_gpus.py gpus`; with `cpu` it says nothing of them.

It shards with FSDP2 and prints losses to the last bit. What it asks of GPUs besides is in `ASKED`.
"""

import contextlib
import io
import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

IS_FOR_GPUS = sys.argv[1] == "gpus"
rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", rank) if IS_FOR_GPUS else torch.device("cpu")
TWO = torch.ones(2)
SAVED = io.BytesIO()
torch.save(TWO, SAVED)


def loaded(place: object) -> torch.Tensor:
    SAVED.seek(0)
    tensor: torch.Tensor = torch.load(SAVED, map_location=place)  # type: ignore[arg-type]
    return tensor


def milliseconds() -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def on_a_stream() -> float:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.cuda.device(rank), torch.accelerator.device_index(rank):
        TWO.record_stream(stream)  # type: ignore[arg-type]
    with torch.cuda.nvtx.range("two"):
        return TWO.sum().item()


def by_default() -> torch.Tensor:
    torch.set_default_device("cuda")
    tensor = torch.ones(2)
    torch.set_default_device(None)
    with torch.device("cuda"):
        return tensor * torch.ones(2)


ASKED: dict[str, Callable[[], object]] = {
    "torch.cuda.is_available": lambda: torch.cuda.is_available() and torch.accelerator.is_available(),
    "torch.cuda.device_count": lambda: torch.cuda.device_count() == torch.accelerator.device_count() == 2,
    "torch.cuda.current_device": lambda: torch.cuda.current_device() == rank,
    "torch.accelerator.current_accelerator": lambda: str(torch.accelerator.current_accelerator()) == "cuda",
    "torch.cuda.is_bf16_supported": torch.cuda.is_bf16_supported,
    "torch.cuda.get_device_capability": lambda: torch.cuda.get_device_capability() >= (8, 0),
    "torch.cuda.get_device_properties": lambda: torch.cuda.get_device_properties(rank).total_memory > 0,
    "torch.cuda.mem_get_info": lambda: torch.cuda.mem_get_info()[1] > 0,
    "torch.cuda.memory_allocated": lambda: torch.cuda.memory_allocated() == torch.accelerator.memory_allocated() == 0,
    "torch.cuda.memory_stats": lambda: torch.cuda.memory_stats()["num_ooms"] == 0,
    "torch.cuda.memory_summary": lambda: torch.cuda.memory_summary() == "",
    "torch.cuda.reset_peak_memory_stats": lambda: torch.cuda.reset_peak_memory_stats() is None,
    "torch.cuda.synchronize": lambda: torch.cuda.synchronize() is None,
    "torch.accelerator.synchronize": lambda: torch.accelerator.synchronize() is None,
    "torch.cuda.empty_cache": lambda: torch.cuda.empty_cache() is None,
    "torch.cuda.get_rng_state": lambda: torch.cuda.set_rng_state(torch.cuda.get_rng_state()) is None,
    "torch.cuda.Event": lambda: milliseconds() >= 0,
    "torch.cuda.Stream": lambda: on_a_stream() == 2,
    ".cuda()": lambda: TWO.cuda(rank, non_blocking=True).pin_memory() is TWO and nn.Linear(2, 2).cuda(),
    ".to(local_rank)": lambda: TWO.to(rank) is TWO and nn.Linear(2, 2).to(torch.device(rank)),
    '.to("cuda")': lambda: TWO.to("cuda:1") is TWO and TWO.to(device="cuda", dtype=torch.bfloat16).sum() == 2,
    'device="cuda"': lambda: torch.tensor([1, 1], device="cuda").sum() + torch.ones(2, device=device).sum() == 4,
    'torch.device(device="cuda")': lambda: by_default().sum() == 2,
    'Generator("cuda")': lambda: torch.randn(2, device="cuda", generator=torch.Generator("cuda")).isfinite().all(),
    'torch.load(map_location="cuda")': lambda: loaded("cuda:1").sum() + loaded({"cuda:0": f"cuda:{rank}"}).sum() == 4,
    'GradScaler("cuda")': lambda: torch.amp.GradScaler("cuda").is_enabled() and torch.amp.GradScaler(init_scale=4.0),
    'new_group(backend="nccl")': lambda: dist.get_backend(dist.new_group(backend="nccl")) == "gloo",
    "DistributedDataParallel(device_ids=local_rank)": lambda: nn.parallel.DistributedDataParallel(
        nn.Linear(2, 2).to(rank), device_ids=[rank], output_device=rank
    ),
}  # fmt: skip

if IS_FOR_GPUS:
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    for what, ask in ASKED.items():
        assert ask(), what
    dist.barrier(device_ids=[rank])
else:
    dist.init_process_group("gloo")
torch.manual_seed(0)
torch.cuda.manual_seed_all(0)
mesh = dist.init_device_mesh(device.type, (2,))
model = nn.Sequential(nn.Linear(8, 8, device=device), nn.ReLU(), nn.Linear(8, 1)).to(device)
for layer in (model[0], model[2]):
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
scaler = torch.amp.GradScaler(device.type, enabled=IS_FOR_GPUS)
torch.manual_seed(rank)
rows = torch.randn(3, 4, 8)
for batch in rows:
    with torch.autocast(device.type, torch.bfloat16, True):
        loss = model(batch.to(device, non_blocking=True)).square().mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()
    print(loss.item().hex())
with contextlib.suppress(torch.cuda.OutOfMemoryError):
    dist.destroy_process_group()
