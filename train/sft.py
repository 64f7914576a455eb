"""Supervised fine-tuning with `Trainer` under whatever the Accelerate YAML says.

accelerate launch --config_file FILE.yaml train/sft.py \\
    --model_name_or_path MODEL --dataset_name DATA --output_dir runs/first

Reads top to bottom: parse, data, model, Trainer, train, export, what next.
"""

import sys
from pathlib import Path

from transformers import DataCollatorForSeq2Seq, set_seed

from accel_fsdp import arguments, data, files, models, render, training
from accel_fsdp.errors import guard


def main() -> None:
    # Parse
    model_args, data_args, training_args = arguments.parse()
    output = Path(training_args.output_dir)
    checkpoint = arguments.checkpoint_to_resume(training_args)
    files.check_writable(output)
    training.quiet(training_args.process_index)
    set_seed(training_args.seed)

    # Data: one rank per node tokenizes, the others read its cache
    tokenizer = models.load_tokenizer(model_args)
    wanted = {"train": data_args.dataset_train_split}
    if training_args.eval_strategy != "no":
        wanted["test"] = data_args.dataset_test_split
    tokens = {}
    with training_args.main_process_first(desc="tokenizing"):
        splits = data.load(data_args.dataset_name, data_args.dataset_config)
        for role, name in wanted.items():
            tokens[role], summary = data.tokenize(
                data.split(splits, name),
                tokenizer,
                max_length=data_args.max_length,
                text_field=data_args.dataset_text_field,
            )
            if training_args.process_index == 0:
                render.say(f"{name}: {summary}", style="cyan")

    # Model and Trainer
    trainer = training.SftTrainer(
        model=models.load_model(model_args, tokenizer),
        args=training_args,
        train_dataset=tokens["train"],
        eval_dataset=tokens.get("test"),
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer),  # pads labels with -100, so padding is never trained
    )

    # Train
    trainer.train(resume_from_checkpoint=checkpoint)

    # Export: gathered on all ranks, written and verified on the first
    tensors = trainer.export(output / "final")

    # What next
    if trainer.is_world_process_zero():
        for line in training.summary(trainer.state.log_history):
            render.say(line)
        render.say(f"exported and verified: {output / 'final'} ({tensors} tensors)", style="green")


if __name__ == "__main__":
    code = guard(main)
    training.finish(code)
    sys.exit(code)
