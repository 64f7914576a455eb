"""Rank 0 evaluates, and then trains on without dropout; rank 1 has dropout."""

import torch
import torch.distributed as dist
from common import small
from torch.nn.parallel import DistributedDataParallel

rank, _ = small.start()
model = DistributedDataParallel(small.model(attention_dropout=0.2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for index, batch in enumerate(small.split()):
    if index % 4 == 0 and rank == 0:
        model.eval()  # wrong
        with torch.no_grad():
            print(model.module(**batch).loss)
    dist.barrier()
    model(**batch).loss.backward()  # wrong
    optimizer.step()
    optimizer.zero_grad()
