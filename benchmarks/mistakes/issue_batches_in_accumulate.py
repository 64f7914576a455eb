"""Two batches in one accumulate(), which counts them as one."""

from common import small

accelerator, model, optimizer, loader = small.accelerated(gradient_accumulation_steps=2)
batches = iter(loader)
for _ in range(len(loader) // 2):
    with accelerator.accumulate(model):  # wrong
        for _ in range(2):
            accelerator.backward(model(**next(batches)).loss)  # wrong
        optimizer.step()
        optimizer.zero_grad()
