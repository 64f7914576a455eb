"""The step gets a closure, which computes the gradients."""

import torch
from common import small
from torch.nn.parallel import DistributedDataParallel

small.start()
model = DistributedDataParallel(small.model())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, nesterov=True)
for batch in small.split():

    def closure(batch=batch):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        return loss

    optimizer.step(closure)
