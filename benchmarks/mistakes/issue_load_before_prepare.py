"""load_state before prepare loads nothing."""

import torch
from accelerate import Accelerator
from common import small

accelerator, model, optimizer, loader = small.accelerated()
small.train(accelerator, model, optimizer, loader)
accelerator.save_state("state")
accelerator.free_memory()

accelerator = Accelerator()
accelerator.load_state("state")  # wrong
model = small.model(seed=7)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, small.loader())
small.train(accelerator, model, optimizer, loader)
