"""LoRA with embeddings that are trained whole, and checkpointing."""

import torch
from accelerate import Accelerator
from common import small
from peft import LoraConfig, get_peft_model

accelerator = Accelerator()
whole = small.model()
whole.gradient_checkpointing_enable({"use_reentrant": False})
whole.enable_input_require_grads()
model = get_peft_model(whole, LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens"]))
optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, small.loader())
small.train(accelerator, model, optimizer, loader)
