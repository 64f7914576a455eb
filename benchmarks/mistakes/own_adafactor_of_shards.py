"""Adafactor keeps rows and columns of a matrix; of FSDP1's flat shards it keeps something else."""

from accelerate import Accelerator
from common import small
from transformers.optimization import Adafactor

accelerator = Accelerator()
model = small.model()
optimizer = Adafactor(model.parameters(), lr=1e-3, relative_step=False, scale_parameter=False)  # wrong
model, optimizer, loader = accelerator.prepare(model, optimizer, small.loader())
for batch in loader:
    accelerator.backward(model(**batch).loss)
    optimizer.step()  # wrong
    optimizer.zero_grad()
