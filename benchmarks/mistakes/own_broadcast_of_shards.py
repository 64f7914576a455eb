"""Rank 0's weights are sent to all, as under DDP; they are shards here."""

import torch
import torch.distributed as dist
from common import small

small.start()
model = small.fsdp1(small.model())
for weight in model.parameters():
    dist.broadcast(weight.data, src=0)  # wrong
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for batch in small.split():
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
