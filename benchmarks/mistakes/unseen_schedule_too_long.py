"""The schedule is made for the batches before prepare, and has got halfway down at the end."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from common.encoder import LanguageModel, Rows, next_words
from torch.utils.data import DataLoader
from transformers import get_cosine_schedule_with_warmup

accelerator = Accelerator()
set_seed(0)
model = LanguageModel()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(Rows(48), batch_size=4, shuffle=True)
total = 2 * len(loader)  # wrong
scheduler = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=total // 10, num_training_steps=total)  # wrong
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _ in range(2):
    for batch in loader:
        loss = next_words(model(batch["ids"]), batch["ids"])
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
