"""An average of each rank's shards, gathered to be saved."""

import torch
from accelerate import Accelerator
from common import small

accelerator = Accelerator()
whole = small.model()
optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-3)
model, optimizer, loader = accelerator.prepare(whole, optimizer, small.loader())
average = {name: weight.detach().clone() for name, weight in model.named_parameters()}
for batch in loader:
    accelerator.backward(model(**batch).loss)
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            average[name].lerp_(weight, 0.1)
whole_average = {name: weight.full_tensor() for name, weight in average.items()}
if accelerator.is_main_process:
    torch.save(whole_average, "average.pt")
accelerator.wait_for_everyone()
