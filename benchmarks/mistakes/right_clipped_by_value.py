"""Clipping by value is the same on shards."""

import torch
from common import small

accelerator, model, optimizer, loader = small.accelerated()
for batch in loader:
    accelerator.backward(model(**batch).loss)
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    optimizer.step()
    optimizer.zero_grad()
