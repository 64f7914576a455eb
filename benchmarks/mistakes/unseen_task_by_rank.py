"""Each rank draws a task of its own, and the other task's head has no gradients there."""

import random

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from common.encoder import Encoder, Rows
from torch import nn
from torch.utils.data import DataLoader


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = Encoder()
        self.heads = nn.ModuleDict({"cls": nn.Linear(32, 4), "reg": nn.Linear(32, 1)})

    def forward(self, ids, task):
        return self.heads[task](self.enc(ids).mean(1))


accelerator = Accelerator()
set_seed(11)
model = Heads()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(Rows(), batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
random.seed(11 + accelerator.process_index)  # wrong
for _ in range(3):
    for batch in loader:
        task = random.choice(["cls", "reg"])  # wrong
        out = model(batch["ids"], task)  # wrong
        loss = F.cross_entropy(out, batch["label"]) if task == "cls" else F.mse_loss(out[:, 0], batch["value"])
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
