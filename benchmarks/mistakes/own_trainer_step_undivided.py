"""A training_step of its own doesn't divide by the accumulated batches."""

from common import small
from transformers import Trainer, TrainingArguments


class Own(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        loss = model(**self._prepare_inputs(inputs)).loss
        loss.backward()  # wrong
        return loss.detach()


arguments = TrainingArguments(
    "out", max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=2, report_to=[], save_strategy="no"
)
Own(small.model(), arguments, train_dataset=small.ROWS).train()  # wrong
