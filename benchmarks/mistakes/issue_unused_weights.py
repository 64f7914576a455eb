"""A head that the loss doesn't use: DDP waits for its gradients."""

import torch
from common import small
from torch import nn
from torch.nn.parallel import DistributedDataParallel

small.start()
whole = small.model()
whole.score = nn.Linear(32, 2)
model = DistributedDataParallel(whole)  # wrong
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for batch in small.split():
    loss = model(**batch).loss  # wrong
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
