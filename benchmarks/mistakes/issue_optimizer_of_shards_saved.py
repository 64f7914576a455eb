"""The optimizer's state of rank 0's shards is saved as if it were all."""

import torch
from common import small

accelerator, model, optimizer, loader = small.accelerated()
small.train(accelerator, model, optimizer, loader)
if accelerator.is_main_process:
    torch.save(optimizer.state_dict(), "optimizer.pt")  # wrong
accelerator.wait_for_everyone()
