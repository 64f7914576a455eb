"""Training and data preparation against TRL's `SFTTrainer`: `python benchmarks/throughput.py [--write]`.

Needs `trl` beside this project (`pip install --no-deps trl`). Both sides get the same model, rows, batch, precision and
attention, with gradient checkpointing off; they take turns in one process, and each number is the median of the
repetitions. Tokens are those of documents, so that padding earns nothing.
"""

import argparse
import gc
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import datasets
import results
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from trl import SFTConfig, SFTTrainer

from accel_fsdp import batching, tokenizing
from accel_fsdp.data_arguments import DataArguments

CHATS = Path(__file__).parent.parent / "train" / "data" / "fsdp_chat" / "train.jsonl"
MAX_LENGTH = 256
PREPARED_LENGTH = 512
BATCH = 4
WARM_UP = 2
"""Steps before the clock starts."""


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    lora: bool
    packing: bool

    @property
    def name(self) -> str:
        """As the table has it."""
        return f"{'LoRA' if self.lora else 'full'}, {'packed' if self.packing else 'not packed'}"


class Clock(TrainerCallback):  # type: ignore[misc]
    """Seconds of the steps after the warm-up."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Starts after the warm-up, and reads at every later step."""
        if state.global_step == WARM_UP:
            self.started = time.perf_counter()
        elif state.global_step > WARM_UP:
            self.seconds = time.perf_counter() - self.started


def rows_of(count: int, shortest: int = 1) -> Dataset:
    """The shipped chats, again and again, each cut to another length so that no two are alike."""
    chats = [json.loads(line)["messages"] for line in CHATS.read_text().splitlines()]

    def cut(number: int) -> list[dict[str, str]]:
        turns = chats[number % len(chats)]
        share = shortest + number % 7
        return [
            {**turn, "content": f"{number}: {turn['content'][: len(turn['content']) * share // 7]}"} for turn in turns
        ]

    return Dataset.from_dict({"messages": [cut(number) for number in range(count)]})


def model_of(name: str | None, tokenizer: PreTrainedTokenizerBase, lora: bool) -> Any:
    """The model of a folder, or a small Llama with the tokenizer's vocabulary, the same each time."""
    torch.manual_seed(0)
    if name:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    else:
        sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6, "num_attention_heads": 8}
        model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=len(tokenizer), **sizes))
    if not lora:
        return model
    return get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))


def settings(output: str, steps: int) -> dict[str, Any]:
    """What both trainers are given."""
    return {
        "output_dir": output,
        "max_steps": steps,
        "per_device_train_batch_size": BATCH,
        "learning_rate": 1e-5,
        "lr_scheduler_type": "constant",
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": not torch.cuda.is_available(),
        "logging_steps": 10_000,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 1,
    }


def counted(collate: Callable[[Any], Any], sizes: list[int]) -> Callable[[Any], Any]:
    """A collator that also notes how many tokens of documents each batch holds."""

    def collated(rows: Any) -> Any:
        sizes.append(sum(len(row["input_ids"]) for row in rows))
        return collate(rows)

    return collated


def ours(case: Case, rows: Dataset, name: str | None, tokenizer: PreTrainedTokenizerBase, steps: int) -> float:
    """Tokens per second of what `train/sft.py` does."""
    options = DataArguments("chats", max_length=MAX_LENGTH, packing=case.packing)
    tokens, _ = tokenizing.tokenize(rows, tokenizer, options, BATCH)
    model = model_of(name, tokenizer, case.lora)
    collate = batching.collator(tokenizer, model, case.packing)
    with tempfile.TemporaryDirectory() as output:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(**settings(output, steps)),
            train_dataset=tokens,
            processing_class=tokenizer,
            data_collator=collate,
            callbacks=[batching.IsolationCheck(collate)] if case.packing else None,
        )
        return timed(trainer)


def theirs(case: Case, rows: Dataset, name: str | None, tokenizer: PreTrainedTokenizerBase, steps: int) -> float:
    """Tokens per second of TRL."""
    with tempfile.TemporaryDirectory() as output:
        config = SFTConfig(max_length=MAX_LENGTH, packing=case.packing, **settings(output, steps))
        model = model_of(name, tokenizer, case.lora)
        return timed(SFTTrainer(model=model, args=config, train_dataset=rows, processing_class=tokenizer))


def timed(trainer: Trainer) -> float:
    """Trains, and returns the tokens per second after the warm-up."""
    clock, sizes = Clock(), list[int]()
    trainer.add_callback(clock)
    trainer.data_collator = counted(trainer.data_collator, sizes)
    trainer.train()
    gc.collect()
    return sum(sizes[WARM_UP : trainer.state.global_step]) / clock.seconds


def prepared_by_us(rows: Dataset, tokenizer: PreTrainedTokenizerBase, processes: int | None, packing: bool) -> float:
    """Seconds from rows to what the trainer reads."""
    options = DataArguments("chats", max_length=PREPARED_LENGTH, packing=packing, dataset_num_proc=processes)
    started = time.perf_counter()
    tokenizing.tokenize(rows, tokenizer, options, BATCH)
    return time.perf_counter() - started


def prepared_by_trl(rows: Dataset, tokenizer: PreTrainedTokenizerBase, processes: int | None, packing: bool) -> float:
    """The same by TRL's own preparation, without the rest of its trainer's start."""
    with tempfile.TemporaryDirectory() as output:
        config = SFTConfig(
            max_length=PREPARED_LENGTH, packing=packing, dataset_num_proc=processes, **settings(output, WARM_UP)
        )
        model = model_of(None, tokenizer, lora=False)
        trainer = SFTTrainer(model=model, args=config, train_dataset=rows.select(range(8)), processing_class=tokenizer)
        started = time.perf_counter()
        trainer._prepare_dataset(rows, tokenizer, config, packing, None, "train")
        return time.perf_counter() - started


def compared(one: Callable[[], float], other: Callable[[], float], times: int) -> tuple[float, float]:
    """The medians of two measurements that take turns, each first every other time."""
    found: tuple[list[float], list[float]] = ([], [])
    for turn in range(times):
        for which in (0, 1) if turn % 2 == 0 else (1, 0):
            found[which].append((one, other)[which]())
    return median(found[0]), median(found[1])


def training_lines(name: str | None, tokenizer: PreTrainedTokenizerBase, steps: int, times: int) -> list[str]:
    """One line per case: tokens/s of both, and their ratio."""
    rows = rows_of(4 * BATCH * (steps + 4), shortest=1)
    lines = ["| training | tokens/s | TRL | ratio |", "|---|---|---|---|"]
    for case in (Case(lora, packing) for lora in (False, True) for packing in (False, True)):

        def one(case: Case = case) -> float:
            return ours(case, rows, name, tokenizer, steps)

        def other(case: Case = case) -> float:
            return theirs(case, rows, name, tokenizer, steps)

        mine, trl = compared(one, other, times)
        lines.append(f"| {case.name} | {mine:,.0f} | {trl:,.0f} | {mine / trl:.2f} |")
        print(lines[-1], flush=True)
    return lines


def preparation_lines(tokenizer: PreTrainedTokenizerBase, count: int, times: int) -> list[str]:
    """Rows per second of both with their defaults (all cores against one), and with the same number of processes."""
    rows = rows_of(count)
    lines = [f"| {count:,} rows prepared | rows/s | TRL | ratio |", "|---|---|---|---|"]
    cores = len(os.sched_getaffinity(0))
    for label, processes, packing in (
        ("the defaults of each", None, False),
        (f"{cores} processes each, packed", cores, True),
    ):

        def one(processes: int | None = processes, packing: bool = packing) -> float:
            return prepared_by_us(rows, tokenizer, processes, packing)

        def other(processes: int | None = processes, packing: bool = packing) -> float:
            return prepared_by_trl(rows, tokenizer, processes, packing)

        mine, trl = compared(one, other, times)
        lines.append(f"| {label} | {count / mine:,.0f} | {count / trl:,.0f} | {trl / mine:.2f} |")
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    """Prints the tables; with --write keeps them in RESULTS.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="folder of a model; default: a small Llama with --tokenizer's vocabulary")
    parser.add_argument("--tokenizer", default="demo/model", help="folder of a tokenizer with a chat template")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--only", choices=["training", "preparation"])
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    datasets.disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(options.model or options.tokenizer)
    if options.only != "preparation":
        lines = training_lines(options.model, tokenizer, options.steps, options.times)
        what = f"`{Path(options.model).name}`" if options.model else "Llama, 256 wide, 6 layers, SmolLM2's vocabulary"
        text = f"{what}, fp32, batches of {BATCH} rows of at most {MAX_LENGTH} tokens, {device()}."
        if options.write:
            write("training", f"{text} Tokens are those of documents, not of padding.", lines)
    if options.only != "training":
        lines = preparation_lines(tokenizer, options.rows, options.times)
        if options.write:
            cores = len(os.sched_getaffinity(0))
            text = f"Chats through SmolLM2's template, at most {PREPARED_LENGTH} tokens, {cores} CPU cores."
            write("preparation", text, lines)


def device() -> str:
    """What the numbers were measured on."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"


def write(section: str, text: str, lines: list[str]) -> None:
    """Replaces a part of RESULTS.md."""
    versions = f"TRL {version('trl')}, transformers {version('transformers')}"
    command = f"`python benchmarks/throughput.py --only {section} --write`"
    part = [f"## {section.capitalize()} against TRL", "", command, "", f"{text} {versions}.", "", *lines]
    results.keep(section, part)


if __name__ == "__main__":
    main()
