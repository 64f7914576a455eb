"""An iterable dataset gives each rank its rows, so its loader isn't prepared."""

import torch
from accelerate import Accelerator
from common import small
from torch.utils.data import DataLoader, IterableDataset


class Share(IterableDataset):
    def __init__(self, rank, ranks):
        self.rank, self.ranks = rank, ranks

    def __iter__(self):
        return iter(small.ROWS[self.rank :: self.ranks])


accelerator = Accelerator()
model = small.model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(Share(accelerator.process_index, accelerator.num_processes), batch_size=2)
model, optimizer = accelerator.prepare(model, optimizer)
small.train(accelerator, model, optimizer, loader)
