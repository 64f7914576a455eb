"""After a forward pass the root's weights are gathered, and the optimizer gets those."""

import torch
from common import small

small.start()
model = small.fsdp2(small.model())
with torch.no_grad():
    print(model(small.TOKENS[:2]).logits.shape)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # wrong
for batch in small.split():
    model(**batch).loss.backward()
    optimizer.step()  # wrong
    optimizer.zero_grad()
