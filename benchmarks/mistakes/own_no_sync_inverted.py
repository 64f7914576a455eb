"""Gradients are averaged in the first micro-batches of a step, and not in the last."""

import contextlib

import torch
from common import small
from torch.nn.parallel import DistributedDataParallel

small.start()
model = DistributedDataParallel(small.model())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for index, batch in enumerate(small.split(), 1):
    last = index % 2 == 0
    with model.no_sync() if last else contextlib.nullcontext():  # wrong
        (model(**batch).loss / 2).backward()  # wrong
    if last:
        optimizer.step()  # wrong
        optimizer.zero_grad()
