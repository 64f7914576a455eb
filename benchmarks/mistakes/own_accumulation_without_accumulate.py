"""Accelerate is to accumulate over 2 batches, and the script steps after each: the loss is halved."""

from common import small

accelerator, model, optimizer, loader = small.accelerated(gradient_accumulation_steps=2)  # wrong
for batch in loader:
    accelerator.backward(model(**batch).loss)  # wrong
    optimizer.step()
    optimizer.zero_grad()
