"""Each epoch has the rows in the same order."""

import torch
from common import small
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

small.start()
model = DistributedDataParallel(small.model())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
sampler = DistributedSampler(small.ROWS, shuffle=True)  # wrong
loader = DataLoader(small.ROWS, batch_size=2, sampler=sampler)  # wrong
for _ in range(2):  # wrong
    for batch in loader:  # wrong
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
