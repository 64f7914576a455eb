"""The encoder's learning rate goes by a name that no weight has under DDP, so all weights take the head's."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from common.encoder import Classifier, Rows
from torch.utils.data import DataLoader

accelerator = Accelerator()
set_seed(0)
model, loader = accelerator.prepare(Classifier(), DataLoader(Rows(), batch_size=4, shuffle=True))
enc = [weight for name, weight in model.named_parameters() if name.startswith("enc.")]  # wrong
rest = [weight for name, weight in model.named_parameters() if not name.startswith("enc.")]  # wrong
groups = [{"params": enc, "lr": 1e-5}, {"params": rest, "lr": 1e-2}]
optimizer = torch.optim.AdamW([group for group in groups if group["params"]])  # wrong
optimizer = accelerator.prepare(optimizer)
for _ in range(2):
    for batch in loader:
        loss = F.cross_entropy(model(batch["ids"]), batch["label"])
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
