"""Each rank writes the same file."""

import torch
from common import small
from torch.nn.parallel import DistributedDataParallel

small.start()
model = DistributedDataParallel(small.model())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
small.steps(model, optimizer, small.split())
torch.save(model.module.state_dict(), "checkpoint.pt")  # wrong
