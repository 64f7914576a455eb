"""An adapter that comes after prepare is in no optimizer."""

import torch
from accelerate import Accelerator
from common import small
from peft import LoraConfig, get_peft_model

accelerator = Accelerator()
model = get_peft_model(small.model(), LoraConfig(r=2, target_modules=["q_proj"]))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, small.loader())
model.add_adapter("second", LoraConfig(r=2, target_modules=["v_proj"]))  # wrong
model.set_adapter("second")  # wrong
for batch in loader:
    accelerator.backward(model(**batch).loss)
    optimizer.step()  # wrong
    optimizer.zero_grad()
