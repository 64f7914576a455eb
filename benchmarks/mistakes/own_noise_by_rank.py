"""Each rank adds noise of its own to the weights, and the replicas drift apart."""

import torch
from common import small
from torch.nn.parallel import DistributedDataParallel

rank, _ = small.start()
model = DistributedDataParallel(small.model())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(rank)
for batch in small.split():
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=1e-3)  # wrong
