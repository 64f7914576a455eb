"""save_model gathers the weights, and only rank 0 calls it."""

from common import small
from transformers import Trainer, TrainingArguments

arguments = TrainingArguments("out", max_steps=2, per_device_train_batch_size=2, report_to=[], save_strategy="no")
trainer = Trainer(small.model(), arguments, train_dataset=small.ROWS)
trainer.train()
if trainer.is_world_process_zero():
    trainer.save_model("saved")  # wrong
