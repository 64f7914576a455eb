"""Rank 0 has more batches than rank 1."""

import torch
from common import small
from torch.nn.parallel import DistributedDataParallel

rank, _ = small.start()
model = DistributedDataParallel(small.model())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
rows = small.ROWS[:10] if rank == 0 else small.ROWS[10:16]  # wrong
for batch in small.loader(rows):  # wrong
    loss = model(**batch).loss  # wrong
    loss.backward()  # wrong
    optimizer.step()
    optimizer.zero_grad()
