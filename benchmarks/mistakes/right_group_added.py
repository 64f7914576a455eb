"""The encoder is unfrozen and its weights given to the optimizer as prepare made them."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from common.encoder import Classifier, Rows
from torch.utils.data import DataLoader

accelerator = Accelerator()
set_seed(0)
model = Classifier()
model.enc.requires_grad_(False)
optimizer = torch.optim.AdamW(model.head.parameters(), lr=1e-3)
loader = DataLoader(Rows(), batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(3):
    if epoch == 1:
        model.enc.requires_grad_(True)
        optimizer.optimizer.add_param_group({"params": list(model.enc.parameters()), "lr": 1e-4})
    for batch in loader:
        loss = F.cross_entropy(model(batch["ids"]), batch["label"])
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
