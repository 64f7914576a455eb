"""Each rank splits the rows into those to train on and those to validate with, without a seed."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from common.encoder import Classifier, Rows
from datasets import Dataset
from torch.utils.data import DataLoader

rows = Rows(48)
data = Dataset.from_dict({"ids": rows.ids.tolist(), "label": rows.label.tolist()}).with_format("torch")
data = data.train_test_split(test_size=0.25)  # wrong
accelerator = Accelerator()
set_seed(0)
model = Classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
train = DataLoader(data["train"], batch_size=4, shuffle=True)
valid = DataLoader(data["test"], batch_size=4)
model, optimizer, train, valid = accelerator.prepare(model, optimizer, train, valid)
for epoch in range(2):
    model.train()
    for batch in train:
        loss = F.cross_entropy(model(batch["ids"]), batch["label"])
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    right = []
    for batch in valid:
        with torch.no_grad():
            predicted = model(batch["ids"]).argmax(-1)
        right.append(accelerator.gather_for_metrics((predicted == batch["label"]).float()))
    accelerator.print(epoch, torch.cat(right).mean().item())
