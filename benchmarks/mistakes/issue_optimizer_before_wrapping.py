"""The optimizer holds the weights from before FSDP, which replaced them."""

import torch
from common import small

small.start()
whole = small.model()
optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-3)  # wrong
model = small.fsdp1(whole)
for batch in small.split():
    model(**batch).loss.backward()
    optimizer.step()  # wrong
    optimizer.zero_grad()
