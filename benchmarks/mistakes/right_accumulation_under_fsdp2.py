"""Accumulation by hand: gradients are reduced with the last micro-batch of a step, and clipped there."""

import torch
from common import small

small.start()
model = small.fsdp2(small.model())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for index, batch in enumerate(small.split(), 1):
    last = index % 4 == 0
    model.set_requires_gradient_sync(last)
    (model(**batch).loss / 4).backward()
    if last:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
