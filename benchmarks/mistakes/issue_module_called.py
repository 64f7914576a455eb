"""The forward pass goes past DDP, which then averages nothing."""

import torch
from common import small
from torch.nn.parallel import DistributedDataParallel

small.start()
model = DistributedDataParallel(small.model())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
unwrapped = model.module
for batch in small.split():
    loss = unwrapped(**batch).loss  # wrong
    loss.backward()
    optimizer.step()  # wrong
    optimizer.zero_grad()
