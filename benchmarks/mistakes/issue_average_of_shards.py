"""An average of the weights is kept and saved of rank 0's shards alone."""

import torch
from common import small

accelerator, model, optimizer, loader = small.accelerated()
average = {name: weight.detach().clone() for name, weight in model.state_dict().items()}
for batch in loader:
    accelerator.backward(model(**batch).loss)
    optimizer.step()
    optimizer.zero_grad()
    for name, weight in model.state_dict().items():
        average[name].lerp_(weight.detach(), 0.1)
if accelerator.is_main_process:
    torch.save(average, "average.pt")  # wrong
