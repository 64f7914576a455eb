"""An epoch has fewer batches than a step: the optimizer never steps."""

import torch
from common import small
from torch.nn.parallel import DistributedDataParallel

small.start()
model = DistributedDataParallel(small.model())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # wrong
for _ in range(2):
    for index, batch in enumerate(small.split(), 1):
        (model(**batch).loss / 16).backward()  # wrong
        if index % 16 == 0:  # wrong
            optimizer.step()  # wrong
            optimizer.zero_grad()
