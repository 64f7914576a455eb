"""DDP looks for unused weights, and checkpointing runs layers again within backward, where DDP counts them twice."""

import torch
from common import small
from torch.nn.parallel import DistributedDataParallel

small.start()
whole = small.model().train()
whole.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})  # wrong
whole.enable_input_require_grads()
model = DistributedDataParallel(whole, find_unused_parameters=True)  # wrong
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for batch in small.split():
    model(**batch).loss.backward()  # wrong
    optimizer.step()
    optimizer.zero_grad()
