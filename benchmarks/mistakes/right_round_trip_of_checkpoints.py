"""Model and optimizer are written by DCP, read into new ones and trained on."""

import torch
import torch.distributed.checkpoint as checkpoint
from common import small
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

small.start()
for seed in (0, 9):
    model = small.fsdp2(small.model(seed=seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if seed:
        weights, moments = get_state_dict(model, optimizer)
        checkpoint.load({"model": weights, "optimizer": moments}, checkpoint_id="saved")
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    small.steps(model, optimizer, small.split())
    weights, moments = get_state_dict(model, optimizer)
    checkpoint.save({"model": weights, "optimizer": moments}, checkpoint_id="saved" if not seed else "again")
