"""NaN gradients are replaced by 0: their weights never move."""

import torch
from common import small

accelerator, model, optimizer, loader = small.accelerated()
for batch in loader:
    logits = model(**batch).logits
    loss = torch.where(logits > 0, logits.sqrt(), logits**2).mean()
    accelerator.backward(loss)
    for weight in model.parameters():
        weight.grad.nan_to_num_()  # wrong
    optimizer.step()
    optimizer.zero_grad()
