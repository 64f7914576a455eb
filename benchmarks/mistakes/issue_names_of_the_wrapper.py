"""The saved names begin with module., which no plain model has."""

import torch
from common import small
from torch.nn.parallel import DistributedDataParallel

rank, _ = small.start()
model = DistributedDataParallel(small.model())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
small.steps(model, optimizer, small.split())
if rank == 0:
    torch.save(model.state_dict(), "pytorch_model.bin")  # wrong
