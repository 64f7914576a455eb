"""Rank 0 alone goes back to earlier weights, in the second epoch."""

import copy

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from common.encoder import Classifier, Rows
from torch.utils.data import DataLoader

accelerator = Accelerator()
set_seed(0)
model = Classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(Rows(), batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
best = copy.deepcopy(accelerator.unwrap_model(model).state_dict())
for epoch in range(2):
    if epoch == 1 and accelerator.is_main_process:  # wrong
        accelerator.unwrap_model(model).load_state_dict(best)  # wrong
    for batch in loader:
        loss = F.cross_entropy(model(batch["ids"]), batch["label"])
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
