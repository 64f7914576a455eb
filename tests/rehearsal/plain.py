"""A plain training script, `plain.py MODEL FOLDER`, whose processes also write down what they hold and their losses.

Each step takes the same four rows however many processes share them.
"""

import json
import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from accel_fsdp.ranks import measure

accelerator = Accelerator()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
rows = torch.randint(0, 100, (16, 12), generator=torch.Generator().manual_seed(0))
loader = DataLoader(rows, batch_size=4 // accelerator.num_processes)  # type: ignore[arg-type]
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
for batch in loader:
    loss = model(input_ids=batch, labels=batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(accelerator.gather(loss.detach()).mean().item())
holding = measure(model)
content = {"engine": holding.engine, "held": holding.held, "weights": holding.weights, "losses": losses}
Path(sys.argv[2], f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(content))
