"""DDP has averaged the gradients, and the script sums them over the ranks once more."""

import torch
import torch.distributed as dist
from common import small
from torch.nn.parallel import DistributedDataParallel

small.start()
model = DistributedDataParallel(small.model())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for batch in small.split():
    model(**batch).loss.backward()
    for weight in model.parameters():
        dist.all_reduce(weight.grad)  # wrong
    optimizer.step()  # wrong
    optimizer.zero_grad()
