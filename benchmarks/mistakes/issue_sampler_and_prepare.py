"""A DistributedSampler splits the rows, and prepare splits them again."""

import torch
from accelerate import Accelerator
from common import small
from torch.utils.data import DataLoader, DistributedSampler

accelerator = Accelerator()
model = small.model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
sampler = DistributedSampler(small.ROWS)  # wrong
loader = DataLoader(small.ROWS, batch_size=2, sampler=sampler)  # wrong
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)  # wrong
small.train(accelerator, model, optimizer, loader)
