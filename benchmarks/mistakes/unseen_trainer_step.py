"""A training_step of its own hands the loss to backward without a division by the accumulated batches."""

from common import small
from transformers import Trainer, TrainingArguments


class Own(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs)
        self.accelerator.backward(loss)  # wrong
        return loss.detach() / self.args.gradient_accumulation_steps


arguments = TrainingArguments(
    "out",
    num_train_epochs=1,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    max_grad_norm=0.5,
    save_strategy="no",
    report_to=[],
)
Own(small.model(), arguments, train_dataset=small.ROWS).train()
