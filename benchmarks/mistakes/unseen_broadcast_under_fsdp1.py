"""Rank 0's weights are sent to all after FSDP1 sharded them, and ranks hold other amounts of each."""

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import set_seed
from common.encoder import LanguageModel, Rows, next_words
from torch.utils.data import DataLoader

accelerator = Accelerator()
set_seed(0)
model = accelerator.prepare(LanguageModel())
for weight in model.parameters():
    dist.broadcast(weight.data, src=0)  # wrong
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
optimizer, loader = accelerator.prepare(optimizer, DataLoader(Rows(), batch_size=4, shuffle=True))
for batch in loader:
    loss = next_words(model(batch["ids"]), batch["ids"])
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
