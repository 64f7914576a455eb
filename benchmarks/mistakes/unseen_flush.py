"""The last step of an epoch waits for a batch that ranks don't have: the loader's length is from before prepare."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from common.encoder import Classifier, Rows
from torch.utils.data import DataLoader

accelerator = Accelerator()
set_seed(0)
model = Classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(Rows(20), batch_size=2, shuffle=True)
steps = len(loader)  # wrong
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _ in range(2):
    for step, batch in enumerate(loader):
        loss = F.cross_entropy(model(batch["ids"]), batch["label"]) / 2
        accelerator.backward(loss)
        if (step + 1) % 2 == 0 or step == steps - 1:  # wrong
            optimizer.step()
            optimizer.zero_grad()
