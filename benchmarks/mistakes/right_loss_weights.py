"""The learned weights of two losses are not prepared; the script averages their gradients."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from common.encoder import MultiTask, Rows
from torch import nn
from torch.utils.data import DataLoader


class UncertaintyLoss(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.log_vars = nn.Parameter(torch.zeros(n))

    def forward(self, losses):
        return (torch.exp(-self.log_vars) * losses + self.log_vars).sum()


accelerator = Accelerator()
set_seed(0)
model, criterion = MultiTask(), UncertaintyLoss(2)
optimizer = torch.optim.Adam([{"params": model.parameters()}, {"params": criterion.parameters(), "lr": 1e-2}], lr=1e-3)
loader = DataLoader(Rows(), batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _ in range(2):
    for batch in loader:
        logits, value = model(batch["ids"])
        losses = torch.stack([F.cross_entropy(logits, batch["label"]), F.mse_loss(value, batch["value"])])
        loss = criterion(losses)
        accelerator.backward(loss)
        criterion.log_vars.grad.copy_(accelerator.reduce(criterion.log_vars.grad, "mean"))
        optimizer.step()
        optimizer.zero_grad()
