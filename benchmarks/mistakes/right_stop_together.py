"""A rank that has enough tells the others, and all stop."""

from common import small

accelerator, model, optimizer, loader = small.accelerated()
goal = 100.0 if accelerator.process_index == 1 else 0.0
for index, batch in enumerate(loader):
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    if index >= 3 and loss < goal:
        accelerator.set_trigger()
    if accelerator.check_trigger():
        break
