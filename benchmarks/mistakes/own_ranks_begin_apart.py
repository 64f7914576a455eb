"""DDP isn't to send rank 0's weights, and each rank draws its own."""

import torch
from common import small
from torch.nn.parallel import DistributedDataParallel

rank, _ = small.start()
model = DistributedDataParallel(small.model(seed=rank), init_sync=False)  # wrong
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
small.steps(model, optimizer, small.split())  # wrong
