"""GPT-2: the head is the embeddings, layers are Conv1D, biases are trained; one unit for all but the blocks."""

import torch
from accelerate import Accelerator
from common import small
from transformers import GPT2Config, GPT2LMHeadModel

accelerator = Accelerator()
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=32, n_layer=2, n_head=4, use_cache=False))
decayed = [weight for weight in model.parameters() if weight.ndim > 1]
plain = [weight for weight in model.parameters() if weight.ndim < 2]
optimizer = torch.optim.AdamW([{"params": decayed}, {"params": plain, "weight_decay": 0.0}], lr=1e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, small.loader())
small.train(accelerator, model, optimizer, loader)
