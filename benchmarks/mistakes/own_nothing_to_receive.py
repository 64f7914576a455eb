"""Rank 0 waits for figures that rank 1 never sends."""

import torch
import torch.distributed as dist
from common import small
from torch.nn.parallel import DistributedDataParallel

rank, _ = small.start()
model = DistributedDataParallel(small.model())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for batch in small.split():
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        theirs = torch.zeros(())
        dist.recv(theirs, src=1)  # wrong
