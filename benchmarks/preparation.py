"""Data preparation against TRL's `SFTTrainer`: `python benchmarks/preparation.py [--write]`.

Needs `trl` beside this project (`pip install --no-deps trl`). They take turns in one process, and each number is the
median of the repetitions.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import datasets
import results
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerBase
from trl import SFTConfig, SFTTrainer

from accel_fsdp.training.data import DataArguments, tokenizing

CHATS = Path(__file__).parent.parent / "train" / "data" / "fsdp_chat" / "train.jsonl"
MAX_LENGTH = 512
BATCH = 4


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


def model_of(tokenizer: PreTrainedTokenizerBase) -> Any:
    """The smallest model that TRL's trainer takes."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    return AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=len(tokenizer), **sizes), trust_remote_code=False)


def prepared_by_us(rows: Dataset, tokenizer: PreTrainedTokenizerBase, processes: int | None, packing: bool) -> float:
    """Seconds from rows to what the trainer reads."""
    options = DataArguments("chats", max_length=MAX_LENGTH, packing=packing, dataset_num_proc=processes)
    started = time.perf_counter()
    tokenizing.tokenize(rows, tokenizer, options, BATCH)
    return time.perf_counter() - started


def prepared_by_trl(rows: Dataset, tokenizer: PreTrainedTokenizerBase, processes: int | None, packing: bool) -> float:
    """The same by TRL's own preparation, without the rest of its trainer's start."""
    with tempfile.TemporaryDirectory() as output:
        config = SFTConfig(
            output_dir=output,
            max_length=MAX_LENGTH,
            packing=packing,
            dataset_num_proc=processes,
            bf16=False,
            use_cpu=not torch.cuda.is_available(),
            report_to="none",
        )
        few = rows.select(range(8))
        trainer = SFTTrainer(model_of(tokenizer), args=config, train_dataset=few, processing_class=tokenizer)
        started = time.perf_counter()
        trainer._prepare_dataset(rows, tokenizer, config, packing, None, "train")
        return time.perf_counter() - started


def compared(first: Callable[[], float], other: Callable[[], float], times: int) -> tuple[float, float]:
    """The medians of two measurements that take turns, each first every other time."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(times):
        for which in (0, 1) if turn % 2 == 0 else (1, 0):
            seconds[which].append((first, other)[which]())
    return median(seconds[0]), median(seconds[1])


def preparation_lines(tokenizer: PreTrainedTokenizerBase, count: int, times: int) -> list[str]:
    """Rows per second of both with their defaults (all cores against one), and with the same number of processes."""
    rows = rows_of(count)
    lines = [f"| {count:,} rows prepared | rows/s | TRL | ratio |", "|---|---|---|---|"]
    cores = len(os.sched_getaffinity(0))
    for label, processes, packing in (
        ("the defaults of each", None, False),
        (f"{cores} processes each, packed", cores, True),
    ):

        def ours(processes: int | None = processes, packing: bool = packing) -> float:
            return prepared_by_us(rows, tokenizer, processes, packing)

        def other(processes: int | None = processes, packing: bool = packing) -> float:
            return prepared_by_trl(rows, tokenizer, processes, packing)

        mine, trl = compared(ours, other, times)
        lines.append(f"| {label} | {count / mine:,.0f} | {count / trl:,.0f} | {trl / mine:.2f} |")
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    """Prints the table; with --write keeps it in RESULTS.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", default="demo/model", help="folder of a tokenizer with a chat template")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    datasets.disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer, trust_remote_code=False)
    lines = preparation_lines(tokenizer, options.rows, options.times)
    if options.write:
        cores = len(os.sched_getaffinity(0))
        text = f"Chats through SmolLM2's template, at most {MAX_LENGTH} tokens, {cores} CPU cores."
        versions = f"TRL {version('trl')}, transformers {version('transformers')}"
        command = "`python benchmarks/preparation.py --write`"
        results.keep("preparation", ["## Preparation against TRL", "", command, "", f"{text} {versions}.", "", *lines])


if __name__ == "__main__":
    main()
