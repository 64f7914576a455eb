"""Supervised fine-tuning with `Trainer`, with the engine and strategy of an Accelerate YAML.

accelerate launch --config_file FILE.yaml train/sft.py \\
    --model_name_or_path MODEL --dataset_name DATA --output_dir runs/first

Reads top to bottom: parse, data, model, Trainer, train, export, what next.
"""

import sys
from pathlib import Path
from typing import Any

from accel_fsdp import console, training
from accel_fsdp.checkpoints import file_names
from accel_fsdp.errors import guard
from accel_fsdp.training import arguments, load_model, resuming, together
from accel_fsdp.training.data import DataArguments, batching, load, tokenizing
from accel_fsdp.training.reporting import lineage, model_card, progress


def main() -> None:
    # Parse
    model_args, data_args, training_args = arguments.parse()

    checkpoint = resuming.chosen(training_args)
    record = training.begin(model_args, data_args, training_args)

    # Data: one rank per node tokenizes on all cores, and the others read its cache
    tokenizer = load_model.load_tokenizer(model_args, data_args.chat_template_path)
    tokens, longest = tokenize(tokenizer, data_args, training_args)
    history = lineage.of_run(checkpoint, model_args, data_args, training_args, tokens["train"])
    record.lap("data")

    # Model and Trainer; stops all ranks if their arguments, rows or weights differ
    model = load_model.load_model(model_args, tokenizer)
    together.compare(
        together.of_arguments(model_args, data_args, training_args),
        together.of_checkpoint(checkpoint, training_args.save_on_each_node),
        together.of_data(history.settings, tokens.get("test"), tokenizer),
        together.of_model(model, load_model.receives_weights(model_args)),
    )
    trainer = training.SftTrainer(
        model=model,
        args=training_args,
        train_dataset=tokens["train"],
        eval_dataset=tokens.get("test"),
        processing_class=tokenizer,
        data_collator=batching.collator(tokenizer, model, data_args.packing, longest),
        history=history,
    )
    record.begin(trainer.report.plan())
    record.lap("model")

    # Train
    with training.recorded(record, trainer), load.reading(data_args.dataset_name):  # streams are read during training
        trainer.train(resume_from_checkpoint=checkpoint)

    # Export: gathered on all ranks, written and verified on the first
    final, rounding = Path(training_args.output_dir) / file_names.FINAL, trainer.exporter.expected.rounding
    tensors = trainer.export(final, model_card.text(record.content, trainer.state.log_history, rounding))
    record.lap("export")
    record.finish(trainer.state.log_history, trainer.report.totals())

    # What next
    if trainer.is_world_process_zero():
        for line in progress.summary(trainer.state, training_args.load_best_model_at_end):
            console.say(line)
        console.say(training.exported(final, tensors, rounding), style="green")
    trainer.checkpoints.require_uploaded()


def tokenize(
    tokenizer: Any, data_args: DataArguments, training_args: arguments.SftArguments
) -> tuple[dict[str, Any], int]:
    """Returns the training and evaluation rows, and the longest known length; a stream's lengths are unknown."""
    split_names = {"train": data_args.dataset_train_split}
    if training_args.eval_strategy != "no":
        split_names["test"] = data_args.dataset_test_split
    tokens, longest = {}, 0
    with training_args.main_process_first(desc="tokenizing"), load.reading(data_args.dataset_name):
        splits = load.load(data_args.dataset_name, data_args.dataset_config, streaming=data_args.streaming)
        for role, name in split_names.items():
            rows = load.split(splits, name)
            if data_args.streaming and role == "train":
                tokens[role] = tokenizing.stream(rows, tokenizer, data_args, training_args.seed)
                continue
            tokens[role], summary = tokenizing.tokenize(
                load.whole(rows), tokenizer, data_args, training_args.per_device_train_batch_size
            )
            longest = max(longest, summary.longest)
            if training_args.process_index == 0:
                console.say(f"{name}: {summary}", style="cyan")
    return tokens, longest


if __name__ == "__main__":
    code = guard(main)
    training.finish(code)
    sys.exit(code)
