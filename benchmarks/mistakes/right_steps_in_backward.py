"""Each weight has an optimizer, which steps in backward as soon as its gradient is there."""

import torch
from common import small

small.start()
model = small.fsdp2(small.model())
optimizers = {weight: torch.optim.AdamW([weight], lr=1e-3) for weight in model.parameters()}


def step(weight):
    optimizers[weight].step()
    optimizers[weight].zero_grad()


for weight in model.parameters():
    weight.register_post_accumulate_grad_hook(step)
for batch in small.split():
    model(**batch).loss.backward()
