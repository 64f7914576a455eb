"""Rank 0's shards are sent to all ranks, whose own are of the same size."""

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import set_seed
from common.encoder import LanguageModel, Rows, next_words
from torch.utils.data import DataLoader

accelerator = Accelerator()
set_seed(0)
model = LanguageModel(words=98)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(Rows(), batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for weight in model.parameters():
    dist.broadcast(weight.data.to_local(), src=0)  # wrong
for batch in loader:
    loss = next_words(model(batch["ids"]), batch["ids"])
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
