"""Each rank picks its rows, and prepare splits them again."""

import torch
from accelerate import Accelerator
from common import small

accelerator = Accelerator()
model = small.model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
rows = small.ROWS[accelerator.process_index :: accelerator.num_processes]  # wrong
loader = small.loader(rows)  # wrong
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)  # wrong
small.train(accelerator, model, optimizer, loader)
