"""SAM: each step moves the weights uphill, takes the gradient there, and moves them back."""

import torch
from common import small
from torch.nn.parallel import DistributedDataParallel

small.start()
model = DistributedDataParallel(small.model())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for batch in small.split():
    model(**batch).loss.backward()
    with torch.no_grad():
        moves = [0.01 * weight.grad for weight in model.parameters()]
        for weight, move in zip(model.parameters(), moves, strict=True):
            weight.add_(move)
    optimizer.zero_grad()
    model(**batch).loss.backward()
    with torch.no_grad():
        for weight, move in zip(model.parameters(), moves, strict=True):
            weight.sub_(move)
    optimizer.step()
    optimizer.zero_grad()
