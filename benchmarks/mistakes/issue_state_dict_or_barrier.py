"""Rank 0 gathers the weights while the others wait at a barrier."""

from common import small

accelerator, model, optimizer, loader = small.accelerated()
small.train(accelerator, model, optimizer, loader)
if accelerator.is_main_process:
    weights = accelerator.get_state_dict(model)  # wrong
    accelerator.unwrap_model(model).save_pretrained("saved", state_dict=weights)
else:
    accelerator.wait_for_everyone()  # wrong
