"""Gradients are kept on each rank while they accumulate, and never reduced."""

import torch
from common import small

small.start()
model = small.fsdp2(small.model())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for index, batch in enumerate(small.split(), 1):
    model.set_requires_gradient_sync(False)  # wrong
    (model(**batch).loss / 2).backward()
    if index % 2 == 0:
        optimizer.step()  # wrong
        optimizer.zero_grad()
