"""The learning rate falls by the validation loss of all ranks' rows."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from common.encoder import Classifier, Rows
from torch.utils.data import DataLoader


def evaluate(model, loader):
    model.eval()
    total = count = 0
    with torch.no_grad():
        for batch in loader:
            total += F.cross_entropy(model(batch["ids"]), batch["label"], reduction="sum").item()
            count += len(batch["label"])
    model.train()
    return total / count


accelerator = Accelerator()
set_seed(0)
model = Classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
train, valid = DataLoader(Rows(), batch_size=4, shuffle=True), DataLoader(Rows(8), batch_size=4)
model, optimizer, train, valid = accelerator.prepare(model, optimizer, train, valid)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer.optimizer, factor=0.5, patience=0)
for _ in range(8):
    for batch in train:
        loss = F.cross_entropy(model(batch["ids"]), batch["label"])
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    value = accelerator.reduce(torch.tensor(evaluate(model, valid)), "mean").item()
    scheduler.step(value)
