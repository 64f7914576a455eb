"""Weights of norms are in no group of the optimizer, though they need gradients."""

import torch
from accelerate import Accelerator
from common import small

accelerator = Accelerator()
model = small.model()
decayed = [weight for name, weight in model.named_parameters() if name.endswith("proj.weight")]
plain = [weight for name, weight in model.named_parameters() if name.endswith(("tokens.weight", "head.weight"))]
optimizer = torch.optim.AdamW([{"params": decayed}, {"params": plain, "weight_decay": 0.0}], lr=1e-3)  # wrong
model, optimizer, loader = accelerator.prepare(model, optimizer, small.loader())  # wrong
small.train(accelerator, model, optimizer, loader)
