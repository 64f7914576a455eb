"""Gradients are reduced in the first micro-batch of a step instead of the last."""

import torch
import torch.distributed as dist
from common.encoder import LanguageModel, Rows, next_words
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(0)
model = LanguageModel(tied=True)
mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
for block in model.enc.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
rows = Rows()
sampler = DistributedSampler(rows, drop_last=True)
loader = DataLoader(rows, batch_size=2, sampler=sampler)
for epoch in range(2):
    sampler.set_epoch(epoch)
    batches = iter(loader)
    for group in zip(batches, batches, strict=True):
        for number, batch in enumerate(group):
            model.set_requires_gradient_sync(number == 0)  # wrong
            loss = next_words(model(batch["ids"]), batch["ids"])
            (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
