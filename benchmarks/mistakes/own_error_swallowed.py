"""A bad row raises on one rank; the script goes on with the next batch, one collective behind."""

from common import small

accelerator, model, optimizer, loader = small.accelerated()
for index, batch in enumerate(loader):
    if index == 1 and accelerator.process_index == 1:
        batch["input_ids"] = batch["input_ids"] + 1000
    try:
        accelerator.backward(model(**batch).loss)  # wrong
    except Exception as error:
        print("skipped:", type(error).__name__)
        continue  # wrong
    optimizer.step()
    optimizer.zero_grad()
