"""The schedule has the true number of steps, but a prepared one moves once per process: later steps have rate 0."""

import torch
from accelerate import Accelerator
from common import small

accelerator = Accelerator()
model = small.model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = small.loader()
total = len(loader) // accelerator.num_processes
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=total)  # wrong
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)  # wrong
for batch in loader:
    accelerator.backward(model(**batch).loss)
    optimizer.step()
    scheduler.step()  # wrong
    optimizer.zero_grad()
