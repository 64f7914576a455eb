"""Ranks share the rows, and nothing averages their gradients."""

import torch
from common import small

rank, _ = small.start()
model = small.model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for batch in small.split():
    model(**batch).loss.backward()  # wrong
    optimizer.step()  # wrong
    optimizer.zero_grad()
if rank == 0:
    model.save_pretrained("saved")
