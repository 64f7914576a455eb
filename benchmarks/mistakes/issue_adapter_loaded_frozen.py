"""PeftModel.from_pretrained loads adapters for inference: nothing is trained."""

import tempfile

import torch
from accelerate import Accelerator
from common import small
from peft import LoraConfig, PeftModel, get_peft_model

accelerator = Accelerator()
folder = tempfile.mkdtemp()
get_peft_model(small.model(), LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(folder)
model = PeftModel.from_pretrained(small.model(), folder)  # wrong
model.enable_input_require_grads()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, small.loader())
for batch in loader:
    accelerator.backward(model(**batch).loss)
    optimizer.step()  # wrong
    optimizer.zero_grad()
