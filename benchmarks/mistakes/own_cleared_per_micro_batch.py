"""zero_grad() after each micro-batch: only the last one of a step is trained on."""

import torch
from common import small

small.start()
model = small.fsdp2(small.model())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for index, batch in enumerate(small.split(), 1):
    (model(**batch).loss / 2).backward()
    if index % 2 == 0:
        optimizer.step()
    optimizer.zero_grad()  # wrong
