"""The ranks' predictions differ in length."""

import torch
from common import small

accelerator, model, optimizer, loader = small.accelerated()
small.train(accelerator, model, optimizer, loader)
length = 8 + 4 * accelerator.process_index
with torch.no_grad():
    predicted = model(input_ids=small.TOKENS[:2, :length]).logits.argmax(-1)
print(accelerator.gather(predicted).shape)  # wrong
