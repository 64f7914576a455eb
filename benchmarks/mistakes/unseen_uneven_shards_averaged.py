"""Gradients are averaged by hand, as under DDP; they are shards here, of uneven sizes."""

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import set_seed
from common.encoder import LanguageModel, Rows, next_words
from torch.utils.data import DataLoader

accelerator = Accelerator()
set_seed(0)
model = LanguageModel()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(Rows(), batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _ in range(2):
    for batch in loader:
        loss = next_words(model(batch["ids"]), batch["ids"])
        accelerator.backward(loss)
        for weight in model.parameters():
            if weight.grad is not None:
                dist.all_reduce(weight.grad.to_local())  # wrong
                weight.grad.to_local().div_(accelerator.num_processes)
        optimizer.step()
        optimizer.zero_grad()
