"""The scheduler moves with each micro-batch, twice as fast as the optimizer."""

import contextlib

import torch
from common import small
from torch.nn.parallel import DistributedDataParallel

small.start()
model = DistributedDataParallel(small.model())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=4)
for index, batch in enumerate(small.split(), 1):
    last = index % 2 == 0
    with contextlib.nullcontext() if last else model.no_sync():
        (model(**batch).loss / 2).backward()
    if last:
        optimizer.step()
        optimizer.zero_grad()
    scheduler.step()  # wrong
