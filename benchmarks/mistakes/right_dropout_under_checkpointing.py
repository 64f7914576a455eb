"""Dropout is drawn again as it was, and differs between ranks."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from common import small

accelerator = Accelerator()
model = small.model(attention_dropout=0.2)
model.gradient_checkpointing_enable({"use_reentrant": False})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, small.loader())
set_seed(3, device_specific=True)
small.train(accelerator, model, optimizer, loader)
