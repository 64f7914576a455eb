"""A copy from before prepare is saved: the weights before training."""

import copy

import torch
from accelerate import Accelerator
from common import small

accelerator = Accelerator()
whole = small.model()
untrained = copy.deepcopy(whole)
optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-3)
model, optimizer, loader = accelerator.prepare(whole, optimizer, small.loader())
small.train(accelerator, model, optimizer, loader)
if accelerator.is_main_process:
    untrained.save_pretrained("saved")  # wrong
accelerator.wait_for_everyone()
