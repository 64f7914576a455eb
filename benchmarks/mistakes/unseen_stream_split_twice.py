"""A stream of each rank's own rows is prepared, which splits it again."""

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from common.encoder import LanguageModel, Rows, next_words
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __init__(self, rank, ranks):
        self.rows, self.rank, self.ranks = Rows(64), rank, ranks

    def __iter__(self):
        for number in range(self.rank, len(self.rows), self.ranks):  # wrong
            yield self.rows[number]


accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
set_seed(0)
model = LanguageModel()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(Stream(accelerator.process_index, accelerator.num_processes), batch_size=4)  # wrong
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)  # wrong
for _ in range(2):
    for batch in loader:
        loss = next_words(model(batch["ids"]), batch["ids"])
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
