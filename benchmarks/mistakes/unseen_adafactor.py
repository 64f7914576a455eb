"""Adafactor is given FSDP1's flat shards, of which it can keep no rows and columns."""

from accelerate import Accelerator
from accelerate.utils import set_seed
from common.encoder import LanguageModel, Rows, next_words
from torch.utils.data import DataLoader
from transformers.optimization import Adafactor

accelerator = Accelerator()
set_seed(0)
model = accelerator.prepare(LanguageModel())
optimizer = Adafactor(model.parameters(), lr=1e-3, relative_step=False, scale_parameter=False)  # wrong
optimizer, loader = accelerator.prepare(optimizer, DataLoader(Rows(), batch_size=4, shuffle=True))
for _ in range(2):
    for batch in loader:
        loss = next_words(model(batch["ids"]), batch["ids"])
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()  # wrong
        optimizer.zero_grad()
