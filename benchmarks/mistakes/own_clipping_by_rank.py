"""The ranks clip to different norms, and the replicas drift apart."""

from common import small

accelerator, model, optimizer, loader = small.accelerated()
limit = 1.0 if accelerator.is_main_process else 0.1
for batch in loader:
    accelerator.backward(model(**batch).loss)
    accelerator.clip_grad_norm_(model.parameters(), limit)  # wrong
    optimizer.step()
    optimizer.zero_grad()
