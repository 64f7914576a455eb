"""Matrices shall decay, and are looked for among FSDP1's shards, which have one dimension."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from common.encoder import LanguageModel, Rows, next_words
from torch.utils.data import DataLoader

accelerator = Accelerator()
set_seed(0)
model = accelerator.prepare(LanguageModel())
matrices = [weight for weight in model.parameters() if weight.dim() >= 2]  # wrong
others = [weight for weight in model.parameters() if weight.dim() < 2]  # wrong
groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
groups = [group for group in groups if group["params"]]  # wrong
optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
optimizer, loader = accelerator.prepare(optimizer, DataLoader(Rows(), batch_size=4, shuffle=True))
for _ in range(2):
    for batch in loader:
        loss = next_words(model(batch["ids"]), batch["ids"])
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
