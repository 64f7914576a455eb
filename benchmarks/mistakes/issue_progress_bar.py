"""The progress bar counts on the main process alone, so that it alone evaluates."""

from common import small
from tqdm import tqdm

accelerator, model, optimizer, loader = small.accelerated()
bar = tqdm(total=len(loader), disable=not accelerator.is_main_process)
for batch in loader:
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    bar.update()
    if bar.n == 2:  # wrong
        print(accelerator.gather_for_metrics(loss).mean())  # wrong
