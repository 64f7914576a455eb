"""Adapters are saved of the gathered weights."""

import torch
from accelerate import Accelerator
from common import small
from peft import LoraConfig, get_peft_model

accelerator = Accelerator()
model = get_peft_model(small.model(), LoraConfig(r=2, target_modules=["q_proj"]))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, small.loader())
small.train(accelerator, model, optimizer, loader)
weights = accelerator.get_state_dict(model)
if accelerator.is_main_process:
    accelerator.unwrap_model(model).save_pretrained("saved", state_dict=weights)
accelerator.wait_for_everyone()
