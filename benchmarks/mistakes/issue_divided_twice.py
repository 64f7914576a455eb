"""The script divides the loss, and accelerator.backward divides it again."""

from common import small

accelerator, model, optimizer, loader = small.accelerated(gradient_accumulation_steps=4)
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(**batch).loss / accelerator.gradient_accumulation_steps  # wrong
        accelerator.backward(loss)  # wrong
        optimizer.step()
        optimizer.zero_grad()
