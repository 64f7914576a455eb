"""A training script with Trainer, `with_trainer.py MODEL FOLDER`: in bf16 as TRL's are, and nothing said of the CPU."""

import sys

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

arguments = TrainingArguments(
    sys.argv[2], bf16=True, max_steps=2, per_device_train_batch_size=2, save_strategy="steps", report_to="none"
)
rows = torch.randint(0, 100, (16, 12), generator=torch.Generator().manual_seed(0))
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
data = [{"input_ids": row, "labels": row} for row in rows]
trainer = Trainer(model, arguments, train_dataset=data)  # type: ignore[arg-type]
trainer.train()
trainer.save_model()
