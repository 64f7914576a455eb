"""A summed loss is divided by the tokens of all ranks, though FSDP divides by the ranks as well."""

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
        for batch in group:
            for row, words in zip(batch["ids"], torch.randint(4, 12, (2,)).tolist(), strict=True):
                row[words:] = 0
        tokens = sum((batch["ids"][:, 1:] != 0).sum() for batch in group)
        dist.all_reduce(tokens)  # wrong
        for number, batch in enumerate(group):
            model.set_requires_gradient_sync(number == 1)
            labels = batch["ids"].masked_fill(batch["ids"] == 0, -100)
            loss = next_words(model(batch["ids"]), labels, reduction="sum")
            (loss / tokens).backward()  # wrong
        optimizer.step()
        optimizer.zero_grad()
