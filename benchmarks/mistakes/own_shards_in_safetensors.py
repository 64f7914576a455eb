"""Each weight is saved as the part that rank 0 holds."""

import torch
from common import small
from safetensors.torch import save_file

rank, _ = small.start()
model = small.fsdp2(small.model())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
small.steps(model, optimizer, small.split())
weights = {name: weight.to_local().contiguous() for name, weight in model.state_dict().items()}  # wrong
if rank == 0:
    save_file(weights, "model.safetensors")  # wrong
