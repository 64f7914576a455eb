"""Accumulation by hand: all but the last micro-batch of a step without averaging."""

import contextlib

import torch
from common import small
from torch.nn.parallel import DistributedDataParallel

small.start()
model = DistributedDataParallel(small.model())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for index, batch in enumerate(small.split(), 1):
    last = index % 4 == 0
    with contextlib.nullcontext() if last else model.no_sync():
        (model(**batch).loss / 4).backward()
    if last:
        optimizer.step()
        optimizer.zero_grad()
