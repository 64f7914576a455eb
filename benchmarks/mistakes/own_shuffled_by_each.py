"""Each rank shuffles the rows for itself before it takes its share."""

import random

import torch
from common import small
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

rank, ranks = small.start()
model = DistributedDataParallel(small.model())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
rows = list(small.ROWS)
random.shuffle(rows)  # wrong
loader = DataLoader(rows[rank::ranks], batch_size=2)  # wrong
for batch in loader:  # wrong
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
