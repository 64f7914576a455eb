"""A method of the head is called past its DDP; the backbone is trained as it should."""

import torch
from common import small
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 1)

    def predict(self, hidden):
        return self.layer(hidden).mean()

    forward = predict


small.start()
backbone = DistributedDataParallel(small.model().model)
head = DistributedDataParallel(Head())
optimizer = torch.optim.AdamW([*backbone.parameters(), *head.parameters()], lr=1e-3)
for batch in small.split():
    hidden = backbone(batch["input_ids"]).last_hidden_state
    loss = (head.module.predict(hidden) - 1) ** 2  # wrong
    loss.backward()
    optimizer.step()  # wrong
    optimizer.zero_grad()
