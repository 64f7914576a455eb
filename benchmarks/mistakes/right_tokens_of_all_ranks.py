"""The loss is a sum over tokens, divided by those of all ranks, times the ranks that DDP divides by."""

import torch
import torch.distributed as dist
from common import small
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

rank, ranks = small.start()
model = DistributedDataParallel(small.model())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for batch in small.split():
    labels = batch["labels"].clone()
    labels[:, : 4 + 4 * rank] = -100
    count = (labels[:, 1:] != -100).sum()
    dist.all_reduce(count)
    logits = model(batch["input_ids"]).logits[:, :-1]
    loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    (loss * ranks / count).backward()
    optimizer.step()
    optimizer.zero_grad()
