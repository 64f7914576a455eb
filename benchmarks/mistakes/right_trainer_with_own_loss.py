"""Trainer with a loss of its own, accumulation, label smoothing, evaluation and saves."""

from common import small
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainingArguments


def weighted(outputs, labels, num_items_in_batch=None):
    logits = outputs.logits[:, :-1].flatten(0, 1)
    loss = cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum", label_smoothing=0.1)
    return loss / (num_items_in_batch if num_items_in_batch is not None else labels[:, 1:].numel())


arguments = TrainingArguments(
    "out",
    max_steps=4,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    eval_strategy="steps",
    eval_steps=2,
    save_steps=2,
    report_to=[],
)
trainer = Trainer(
    small.model(), arguments, train_dataset=small.ROWS, eval_dataset=small.ROWS[:6], compute_loss_func=weighted
)
trainer.train()
trainer.save_model("saved")
