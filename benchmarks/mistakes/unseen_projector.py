"""The projection of a student to its teacher's width is trained and not prepared."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from common.encoder import Encoder, Rows
from torch import nn
from torch.utils.data import DataLoader

accelerator = Accelerator()
set_seed(0)
teacher = Encoder(width=48).eval().requires_grad_(False)
student = Encoder()
proj = nn.Linear(32, 48).to(accelerator.device)
optimizer = torch.optim.AdamW([*student.parameters(), *proj.parameters()], lr=2e-3)
loader = DataLoader(Rows(), batch_size=4, shuffle=True)
student, optimizer, loader = accelerator.prepare(student, optimizer, loader)  # wrong
for _ in range(2):
    for batch in loader:
        with torch.no_grad():
            taught = teacher(batch["ids"])
        loss = F.mse_loss(proj(student(batch["ids"])), taught)  # wrong
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
