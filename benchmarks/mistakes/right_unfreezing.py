"""The head is trained first, all weights later."""

import torch
from common import small

small.start()
model = small.fsdp2(small.model().requires_grad_(False))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for index, batch in enumerate(small.split()):
    for name, weight in model.named_parameters():
        weight.requires_grad_("lm_head" in name or index >= 3)
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
