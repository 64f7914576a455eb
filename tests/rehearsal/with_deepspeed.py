"""A training script that calls DeepSpeed's engine, with one mistake: `with_deepspeed.py NAME MODEL`."""

import sys
from typing import Any

import deepspeed
import torch
from accelerate import Accelerator
from deepspeed.utils import safe_get_full_grad, safe_set_full_grad
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

NAME, MODEL = sys.argv[1:3]
accelerator = Accelerator()
torch.manual_seed(0)
model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
trained = model.model if NAME == "head forgotten" else model
optimizer: Any = torch.optim.AdamW(trained.parameters(), lr=1e-3)
loader: Any = DataLoader(torch.randint(0, 100, (32, 12)), batch_size=2)  # type: ignore[arg-type]
engine, optimizer, loader = accelerator.prepare(model, optimizer, loader)
weights = list(engine.module.parameters())


def overwrite(weight: nn.Parameter) -> None:
    """On rank 0, whose values DeepSpeed then sends to all ranks."""
    with torch.no_grad(), deepspeed.zero.GatheredParameters(weight, modifier_rank=0):
        weight.mul_(1.1)


for step, batch in enumerate(loader):
    loss = engine(input_ids=batch, labels=batch).loss
    share = 2.0 if NAME == "times ranks" else 1.0
    if NAME == "past the engine":
        loss.backward()
        optimizer.step()
        continue
    engine.backward(loss * share, scale_wrt_gas=NAME != "not divided")
    if NAME == "scaled on a rank":
        gradients = [safe_get_full_grad(weight) for weight in weights]
        if accelerator.process_index == 1:
            for weight, gradient in zip(weights, gradients, strict=True):
                safe_set_full_grad(weight, gradient * 2)
    engine.step()
    if NAME == "changed behind" and step == 0:
        overwrite(weights[0])
    if step == 3:
        break
