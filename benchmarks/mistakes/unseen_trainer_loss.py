"""A Trainer's own loss is divided by the tokens of all ranks and not multiplied by the number of ranks."""

import torch.nn.functional as F
from common import small
from transformers import Trainer, TrainingArguments


class Own(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        out = model(**inputs)
        logits, targets = out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        items = (targets != -100).sum() if num_items_in_batch is None else num_items_in_batch
        loss = F.cross_entropy(logits, targets, reduction="sum") / items  # wrong
        return (loss, out) if return_outputs else loss


arguments = TrainingArguments(
    "out",
    num_train_epochs=1,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    average_tokens_across_devices=True,
    save_strategy="no",
    report_to=[],
)
Own(small.model(), arguments, train_dataset=small.ROWS).train()
