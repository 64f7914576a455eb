"""Two heads, of which each step uses one; DDP looks for the unused."""

import torch
from common import small
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.heads = nn.ModuleList([nn.Linear(16, 1), nn.Linear(16, 3)])

    def forward(self, rows, head):
        return self.heads[head](self.body(rows).relu())


rank, _ = small.start()
torch.manual_seed(0)
model = DistributedDataParallel(TwoHeads(), find_unused_parameters=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(rank)
for index in range(6):
    model(torch.randn(4, 8), index % 2).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
