"""Rows are compared with those of all ranks, and gradients flow back to these."""

import math

import torch
import torch.distributed.nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from common.encoder import Encoder, Rows
from torch import nn
from torch.utils.data import DataLoader


class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = Encoder(layers=1), Encoder(layers=1)
        self.logit_scale = nn.Parameter(torch.tensor([math.log(1 / 0.07)]))

    def forward(self, x, y):
        return F.normalize(self.a(x).mean(1), dim=-1), F.normalize(self.b(y).mean(1), dim=-1), self.logit_scale.exp()


accelerator = Accelerator()
set_seed(3)
model = Clip()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98))
loader = DataLoader(Rows(), batch_size=4, shuffle=True, drop_last=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _ in range(2):
    for batch in loader:
        za, zb, scale = model(batch["ids"], batch["ids2"])
        all_a = torch.cat(torch.distributed.nn.all_gather(za))
        all_b = torch.cat(torch.distributed.nn.all_gather(zb))
        labels = torch.arange(len(za)) + accelerator.process_index * len(za)
        loss = F.cross_entropy(scale * za @ all_b.T, labels) + F.cross_entropy(scale * zb @ all_a.T, labels)
        accelerator.backward(loss / 2)
        optimizer.step()
        optimizer.zero_grad()
