"""Only rank 0 computes the norm of all gradients, for which the shards of all are needed."""

import torch
from common import small

rank, _ = small.start()
model = small.fsdp2(small.model())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for batch in small.split():
    model(**batch).loss.backward()
    if rank == 0:
        norms = [weight.grad.norm().full_tensor() for weight in model.parameters()]  # wrong
        print(torch.stack(norms).norm())
    optimizer.step()
    optimizer.zero_grad()
