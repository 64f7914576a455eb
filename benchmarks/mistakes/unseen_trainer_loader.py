"""A Trainer's own loader is not prepared, and each rank trains on all rows."""

import torch
from common import small
from torch.utils.data import DataLoader, RandomSampler
from transformers import Trainer, TrainingArguments


class Sampled(Trainer):
    def get_train_dataloader(self):
        sampler = RandomSampler(self.train_dataset, generator=torch.Generator().manual_seed(5))
        return DataLoader(self.train_dataset, 2, sampler=sampler, collate_fn=self.data_collator)  # wrong


arguments = TrainingArguments("out", max_steps=4, save_strategy="no", report_to=[])
Sampled(small.model(), arguments, train_dataset=small.ROWS).train()
