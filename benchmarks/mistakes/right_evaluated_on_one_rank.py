"""Under DDP rank 0 may evaluate alone, past the wrapper; all wait for it."""

import torch
import torch.distributed as dist
from common import small
from torch.nn.parallel import DistributedDataParallel

rank, _ = small.start()
model = DistributedDataParallel(small.model())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
small.steps(model, optimizer, small.split())
if rank == 0:
    model.eval()
    with torch.no_grad():
        print(sum(model.module(**batch).loss for batch in small.loader()))
    model.module.save_pretrained("saved")
    model.train()
dist.barrier()
small.steps(model, optimizer, small.split())
