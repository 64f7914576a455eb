"""The saved names begin with _orig_mod., which no plain model has."""

import torch
from common import small
from torch.nn.parallel import DistributedDataParallel

rank, _ = small.start()
model = DistributedDataParallel(torch.compile(small.model(), backend="eager"))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
small.steps(model, optimizer, small.split())
if rank == 0:
    torch.save(model.module.state_dict(), "pytorch_model.bin")  # wrong
