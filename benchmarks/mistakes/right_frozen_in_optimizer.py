"""PEFT's own way: AdamW gets all parameters, most of which are frozen."""

import torch
from accelerate import Accelerator
from common import small
from peft import LoraConfig, get_peft_model

accelerator = Accelerator()
model = get_peft_model(small.model(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, small.loader())
small.train(accelerator, model, optimizer, loader)
