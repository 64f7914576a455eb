"""fully_shard of the layers alone: no rank averages the embeddings and the head."""

import torch
import torch.distributed as dist
from common import small
from torch.distributed.fsdp import fully_shard

small.start()
model = small.model()
mesh = dist.init_device_mesh("cpu", (2,))
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh)  # wrong
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
for batch in small.split():
    model(**batch).loss.backward()
    optimizer.step()  # wrong
    optimizer.zero_grad()
