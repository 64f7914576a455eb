"""Two forward passes before backward: DDP overwrites the buffers of BatchNorm in between."""

import torch
from common import small
from torch import nn
from torch.nn.parallel import DistributedDataParallel

rank, _ = small.start()
torch.manual_seed(0)
critic = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))  # wrong
optimizer = torch.optim.AdamW(critic.parameters(), lr=1e-3)
torch.manual_seed(rank)
for _ in range(3):
    fake = critic(torch.randn(4, 8))  # wrong
    real = critic(torch.randn(4, 8) + 1)  # wrong
    (fake.mean() - real.mean()).backward()  # wrong
    optimizer.step()
    optimizer.zero_grad()
