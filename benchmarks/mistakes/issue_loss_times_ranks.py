"""The loss is multiplied by the number of ranks, though DDP averages."""

import torch
from common import small
from torch.nn.parallel import DistributedDataParallel

_, ranks = small.start()
model = DistributedDataParallel(small.model())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for batch in small.split():
    loss = model(**batch).loss
    loss = loss * ranks  # wrong
    loss.backward()  # wrong
    optimizer.step()
    optimizer.zero_grad()
