"""The head is trained, and FSDP is told to leave it alone: its gradients aren't averaged."""

import torch
from common import small

small.start()
whole = small.model()
model = small.fsdp1(whole, ignored_modules=[whole.lm_head], use_orig_params=True)  # wrong
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for batch in small.split():
    model(**batch).loss.backward()
    optimizer.step()  # wrong
    optimizer.zero_grad()
