"""A user's script with Trainer, two lines of which are about checkpoints: MODEL DATA OUT [checkpoint_uri]."""

import os
import signal
import sys
from typing import Any

import datasets
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import accel_fsdp

model_name, data, output, *uri = sys.argv[1:]


class End(TrainerCallback):
    """The end of rank 1, at a step and by a signal of the test's choice."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step, number = os.environ.get("KILL_STEP", "0 9").split()
        if state.global_step == int(step) and os.environ["RANK"] == "1":
            os.kill(os.getpid(), int(number))


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_name)
    rows = datasets.load_dataset("json", data_files=data, split="train")
    rows = rows.map(lambda row: tokenizer(row["text"], truncation=True, max_length=32), remove_columns=["text"])
    ranks = int(os.environ["WORLD_SIZE"])
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(model_name),
        args=TrainingArguments(
            output_dir=output,
            per_device_train_batch_size=12 // ranks,
            max_steps=10,
            save_steps=2,
            save_total_limit=2,
            logging_steps=1,
            learning_rate=1e-3,
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=rows,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        processing_class=tokenizer,
        callbacks=[End()],
    )
    accel_fsdp.Checkpoints(trainer, async_checkpoints=True, checkpoint_uri=uri[0] if uri else None)
    trainer.train(resume_from_checkpoint="auto")


assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
main()
