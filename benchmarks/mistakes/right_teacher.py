"""Distillation: an unsharded teacher on each rank, which nobody trains."""

import torch
from accelerate import Accelerator
from common import small
from torch.nn.functional import kl_div, log_softmax, softmax

accelerator = Accelerator()
student, teacher = small.model(), small.model(seed=5, hidden_size=64).eval()
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
student, optimizer, loader = accelerator.prepare(student, optimizer, small.loader())
for batch in loader:
    with torch.no_grad():
        goal = softmax(teacher(batch["input_ids"]).logits, -1)
    logits = log_softmax(student(batch["input_ids"]).logits, -1)
    accelerator.backward(kl_div(logits, goal, reduction="batchmean"))
    optimizer.step()
    optimizer.zero_grad()
