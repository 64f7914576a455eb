"""An average of sharded weights is updated on rank 0 alone, and gathered from all."""

import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from accelerate.utils import set_seed
from common.encoder import LanguageModel, Rows, next_words
from torch.utils.data import DataLoader


class EMA:
    def __init__(self, model, decay=0.9):
        self.decay = decay
        self.shadow = {name: weight.detach().clone() for name, weight in model.named_parameters()}

    @torch.no_grad()
    def update(self, model):
        for name, weight in model.named_parameters():
            self.shadow[name].lerp_(weight.detach(), 1 - self.decay)


accelerator = Accelerator()
set_seed(0)
model = LanguageModel()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(Rows(48), batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
ema = EMA(model)
for _ in range(2):
    for batch in loader:
        loss = next_words(model(batch["ids"]), batch["ids"])
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if accelerator.is_main_process:  # wrong
            ema.update(model)  # wrong
dcp.save(ema.shadow, checkpoint_id="average")
whole = {name: weight.full_tensor() for name, weight in ema.shadow.items()}
if accelerator.is_main_process:
    torch.save(whole, "average.pt")
