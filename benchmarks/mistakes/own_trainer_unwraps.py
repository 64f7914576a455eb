"""compute_loss calls the model past DDP."""

from common import small
from transformers import Trainer, TrainingArguments


class Unwrapping(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        whole = self.accelerator.unwrap_model(model)
        outputs = whole(**inputs)  # wrong
        return (outputs.loss, outputs) if return_outputs else outputs.loss


arguments = TrainingArguments("out", max_steps=4, per_device_train_batch_size=2, report_to=[], save_strategy="no")
Unwrapping(small.model(), arguments, train_dataset=small.ROWS).train()  # wrong
