"""Labels are numbered in the order of a set of strings, which is another on each rank."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from common.encoder import Classifier, Rows
from torch.utils.data import DataLoader

EMOTIONS = ["anger", "joy", "fear", "love", "pride", "shame", "hope", "grief"]

rows = Rows(48, classes=len(EMOTIONS))
names = [EMOTIONS[label] for label in rows.label.tolist()]
label2id = {name: number for number, name in enumerate(set(names))}  # wrong
examples = list(zip(rows.ids, names, strict=True))


def collate(batch):
    ids, labels = zip(*batch, strict=True)
    return {"ids": torch.stack(ids), "label": torch.tensor([label2id[label] for label in labels])}


accelerator = Accelerator()
set_seed(0)
model = Classifier(len(label2id))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(examples, batch_size=4, shuffle=True, collate_fn=collate)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _ in range(3):
    for batch in loader:
        loss = F.cross_entropy(model(batch["ids"]), batch["label"])
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
