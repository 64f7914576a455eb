"""Two forward passes before backward, between which DDP sends rank 0's buffers of BatchNorm to all ranks.

In earlier versions of torch this ended with an error in backward (pytorch/pytorch#175024).
"""

import torch
from common import small
from torch import nn
from torch.nn.parallel import DistributedDataParallel

rank, _ = small.start()
torch.manual_seed(0)
critic = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))
optimizer = torch.optim.AdamW(critic.parameters(), lr=1e-3)
torch.manual_seed(rank)
for _ in range(3):
    fake = critic(torch.randn(4, 8))
    real = critic(torch.randn(4, 8) + 1)
    (fake.mean() - real.mean()).backward()
    optimizer.step()
    optimizer.zero_grad()
