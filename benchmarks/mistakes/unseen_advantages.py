"""The advantages of all ranks are gathered, and each rank takes rank 0's for its own rows."""

import torch
from accelerate import Accelerator
from accelerate.utils import gather, set_seed
from common.encoder import LanguageModel, Rows
from torch.utils.data import DataLoader

accelerator = Accelerator()
set_seed(0)
policy = LanguageModel()
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
loader = DataLoader(Rows(), batch_size=4, shuffle=True)
policy, optimizer, loader = accelerator.prepare(policy, optimizer, loader)
torch.manual_seed(100 + accelerator.process_index)  # other completions on each rank
for _ in range(2):
    for batch in loader:
        prompt = batch["ids"][:, :6]
        with torch.no_grad():
            completion = torch.multinomial(policy(prompt)[:, -1].softmax(-1), 6, replacement=True)
        rewards = gather((completion % 2 == 0).float().mean(-1))
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        advantages = advantages[: len(prompt)]  # wrong
        logp = torch.log_softmax(policy(torch.cat([prompt, completion], 1))[:, 5:-1], -1)
        logp = logp.gather(-1, completion[..., None]).squeeze(-1)
        loss = -(torch.exp(logp - logp.detach()) * advantages[:, None]).mean()  # wrong
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
