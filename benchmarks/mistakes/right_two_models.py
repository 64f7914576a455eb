"""A GAN: two models and two optimizers, of which each step moves one."""

import torch
from common import small
from torch import nn
from torch.nn.functional import softplus
from torch.nn.parallel import DistributedDataParallel

rank, _ = small.start()
torch.manual_seed(0)
maker = DistributedDataParallel(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8)))
critic = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
makers = torch.optim.Adam(maker.parameters(), lr=1e-3)
critics = torch.optim.Adam(critic.parameters(), lr=1e-3)
torch.manual_seed(rank)
for _ in range(6):
    images = maker(torch.randn(4, 4))
    critics.zero_grad()
    (softplus(critic(images.detach())).mean() + softplus(-critic(torch.randn(4, 8) + 1)).mean()).backward()
    critics.step()
    makers.zero_grad()
    softplus(-critic(images)).mean().backward()
    makers.step()
