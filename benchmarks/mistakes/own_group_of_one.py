"""FSDP gets a group with this rank alone: each rank trains a model of its own."""

import torch
import torch.distributed as dist
from common import small

rank, ranks = small.start()
groups = [dist.new_group([member]) for member in range(ranks)]
model = small.fsdp1(small.model(), process_group=groups[rank], use_orig_params=True)  # wrong
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
small.steps(model, optimizer, small.split())  # wrong
