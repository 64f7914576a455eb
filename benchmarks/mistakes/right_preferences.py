"""DPO by hand: a frozen reference, two forward passes of the trained model in one loss."""

import torch
from accelerate import Accelerator
from common import small
from torch.nn.functional import logsigmoid

accelerator = Accelerator()
model, reference = small.model(), small.model().eval().requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, small.loader())
for batch in loader:
    better, worse = batch["input_ids"], batch["input_ids"].flip(1)
    gain = -model(input_ids=better, labels=better).loss + model(input_ids=worse, labels=worse).loss
    with torch.no_grad():
        known = -reference(input_ids=better, labels=better).loss + reference(input_ids=worse, labels=worse).loss
    accelerator.backward(-logsigmoid(0.1 * (gain - known)))
    optimizer.step()
    optimizer.zero_grad()
