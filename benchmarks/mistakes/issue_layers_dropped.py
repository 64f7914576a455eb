"""Each rank draws which layers it leaves out, and layers are FSDP's units."""

import random

import torch
from common import small
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(FullyShardedDataParallel(nn.Linear(32, 32)) for _ in range(6))

    def forward(self, hidden):
        for layer in self.layers:
            if random.random() > 0.5:  # wrong
                hidden = hidden + layer(hidden)  # wrong
        return hidden


rank, _ = small.start()
random.seed(rank)
torch.manual_seed(0)
model = FullyShardedDataParallel(Stack())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(4):
    model(torch.randn(4, 32)).pow(2).mean().backward()  # wrong
    optimizer.step()
    optimizer.zero_grad()
