"""A warm-up whose first step has rate 0."""

import torch
from accelerate import Accelerator
from common import small

accelerator = Accelerator(step_scheduler_with_optimizer=False)
model = small.model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step / 4, 1.0))
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, small.loader(), scheduler)
for batch in loader:
    accelerator.backward(model(**batch).loss)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
