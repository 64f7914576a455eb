"""The optimizer isn't prepared: it steps with each micro-batch, between whiles with a rank's own gradients."""

import torch
from accelerate import Accelerator
from common import small

accelerator = Accelerator(gradient_accumulation_steps=2)
model = small.model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # wrong
model, loader = accelerator.prepare(model, small.loader())  # wrong
for batch in loader:
    with accelerator.accumulate(model):
        accelerator.backward(model(**batch).loss)
        optimizer.step()  # wrong
        optimizer.zero_grad()
