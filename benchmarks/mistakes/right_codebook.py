"""A codebook, which is a buffer, moves by the rows of all ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from common.encoder import Block, Encoder, Rows
from torch import nn
from torch.utils.data import DataLoader


class Codebook(nn.Module):
    def __init__(self, n=16, d=32):
        super().__init__()
        self.register_buffer("embed", torch.randn(n, d))
        self.register_buffer("size", torch.ones(n))
        self.register_buffer("avg", self.embed.clone())

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        nearest = torch.cdist(flat, self.embed).argmin(-1)
        q = F.embedding(nearest, self.embed).view_as(x)
        if self.training:
            with torch.no_grad():
                one = F.one_hot(nearest, len(self.embed)).float()
                size, total = one.sum(0), one.T @ flat
                dist.all_reduce(size)
                dist.all_reduce(total)
                self.size.lerp_(size, 0.1)
                self.avg.lerp_(total, 0.1)
                self.embed.copy_(self.avg / self.size.clamp_min(1e-5)[:, None])
        return x + (q - x).detach(), F.mse_loss(x, q.detach())


class VQ(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.book, self.dec, self.out = Encoder(), Codebook(), Block(32), nn.Linear(32, 97)

    def forward(self, ids):
        q, commit = self.book(self.enc(ids))
        return F.cross_entropy(self.out(self.dec(q)).flatten(0, 1), ids.flatten()) + 0.25 * commit


accelerator = Accelerator()
set_seed(0)
model = VQ()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(Rows(), batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _ in range(2):
    for batch in loader:
        accelerator.backward(model(batch["ids"]))
        optimizer.step()
        optimizer.zero_grad()
