"""The optimizer is made anew after its scheduler, which goes on with the first one."""

import torch
from accelerate import Accelerator
from common import small

accelerator = Accelerator()
model = small.model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, total_iters=16)  # wrong
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)  # wrong
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, small.loader(), scheduler)  # wrong
for batch in loader:
    accelerator.backward(model(**batch).loss)
    optimizer.step()
    scheduler.step()  # wrong
    optimizer.zero_grad()
