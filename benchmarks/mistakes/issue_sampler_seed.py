"""The sampler's seed depends on the rank: some rows are trained twice, others never."""

import torch
from common import small
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

rank, _ = small.start()
model = DistributedDataParallel(small.model())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
sampler = DistributedSampler(small.ROWS, seed=1000 * rank)  # wrong
loader = DataLoader(small.ROWS, batch_size=2, sampler=sampler)  # wrong
for batch in loader:  # wrong
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
