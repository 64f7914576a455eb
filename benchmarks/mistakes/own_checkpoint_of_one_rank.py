"""DCP is to write without the other ranks: rank 0's shards alone."""

import torch
import torch.distributed.checkpoint as checkpoint
from common import small

rank, _ = small.start()
model = small.fsdp2(small.model())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
small.steps(model, optimizer, small.split())
if rank == 0:
    checkpoint.save({"model": model.state_dict()}, checkpoint_id="saved", no_dist=True)  # wrong
