"""Two losses are balanced by how fast the means over ranks fall."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from common.encoder import MultiTask, Rows
from torch.utils.data import DataLoader

accelerator = Accelerator()
set_seed(0)
model = MultiTask()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(Rows(), batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
history, weights = [], torch.ones(2)
for _ in range(2):
    for batch in loader:
        logits, value = model(batch["ids"])
        losses = torch.stack([F.cross_entropy(logits, batch["label"]), F.mse_loss(value, batch["value"])])
        accelerator.backward((weights * losses).sum())
        optimizer.step()
        optimizer.zero_grad()
        history.append(accelerator.reduce(losses.detach(), "mean"))
        if len(history) > 1:
            weights = 2 * torch.softmax(history[-1] / history[-2] / 0.5, 0)
