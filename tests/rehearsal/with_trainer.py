"""A training script with Trainer, `with_trainer.py MODEL FOLDER`: in bf16 as TRL's are, and nothing said of the CPU.

With a third argument a step has two micro-batches. `undivided`: its training_step forgets to divide the loss by them.
`loader`: it makes its own loader, unprepared.
"""

import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments


class Undivided(Trainer):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        loss: torch.Tensor = model(**self._prepare_inputs(inputs)).loss
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()


class Unprepared(Trainer):
    def get_train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.train_dataset, 2, collate_fn=self.data_collator)  # type: ignore


KIND = sys.argv[3] if len(sys.argv) > 3 else ""
arguments = TrainingArguments(
    sys.argv[2],
    bf16=not KIND,
    max_steps=2,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2 if KIND else 1,
    save_strategy="no" if KIND else "steps",
    report_to="none",
)
rows = torch.randint(0, 100, (16, 12), generator=torch.Generator().manual_seed(0))
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
data = [{"input_ids": row, "labels": row} for row in rows]
kinds = {"undivided": Undivided, "loader": Unprepared, "": Trainer}
trainer = kinds[KIND](model, arguments, train_dataset=data)  # type: ignore[arg-type]
trainer.train()
trainer.save_model()
