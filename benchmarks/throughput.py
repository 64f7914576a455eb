"""`train/sft.py` against TRL's own script, each launched as a user does: `python benchmarks/throughput.py [--write]`.

Needs `trl` beside this project (`pip install --no-deps trl`) and the demo's model (`make demo`). Both sides get the
same Accelerate YAML, model, rows, batch, precision and attention, with gradient checkpointing off; they take turns, and
each number is the median of the repetitions. The time is Trainer's own `train_runtime`, all of `trainer.train()`.
Tokens are those of documents, so that padding earns nothing.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from itertools import product
from pathlib import Path
from statistics import median

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import results
import torch
from children import ROOT, environment
from preparation import rows_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

SMOLLM2, NARROW = "SmolLM2-135M", "256 wide"
BATCH, MAX_LENGTH = 4, 256
ROWS = {NARROW: 48, SMOLLM2: 24}
"""Of the one epoch: a quarter to half a minute of training on two cores."""
SIDES = {"ours": [str(ROOT / "train" / "sft.py")], "TRL": ["--module", "trl.scripts.sft"]}
LAUNCH_SECONDS = 900


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    model: str
    processes: int
    lora: bool
    packing: bool

    @property
    def name(self) -> str:
        """As the table has it."""
        ranks = "1 process" if self.processes == 1 else f"{self.processes} processes"
        kind = f"{'LoRA' if self.lora else 'full'}, {'packed' if self.packing else 'not packed'}"
        return f"{self.model}, {ranks}, {kind}"


def narrow_model(tokenizer_of: Path, folder: Path) -> Path:
    """A small Llama with the tokenizer of another model, and its vocabulary."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of, trust_remote_code=False)
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6, "num_attention_heads": 8}
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes, **ends)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_rows(case: Case, tokenizer_of: Path, folder: Path) -> int:
    """Chats that fit into `MAX_LENGTH` tokens, so that neither side cuts any; returns their tokens."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of, trust_remote_code=False)
    chats = rows_of(ROWS[case.model] * 3)["messages"]
    sizes = [len(tokenizer.apply_chat_template(chat, tokenize=True)["input_ids"]) for chat in chats]
    kept = [(chat, size) for chat, size in zip(chats, sizes, strict=True) if size < MAX_LENGTH][: ROWS[case.model]]
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat, _ in kept))
    return sum(size for _, size in kept)


def yaml_of(case: Case, path: Path) -> Path:
    """The Accelerate YAML of both: one process, or plain DDP, which is what both can run on GPUs and on a CPU."""
    kind = "'NO'" if case.processes == 1 else "MULTI_GPU"
    path.write_text(
        f"compute_environment: LOCAL_MACHINE\ndistributed_type: {kind}\nmixed_precision: 'no'\n"
        f"num_machines: 1\nnum_processes: {case.processes}\n"
    )
    return path


def arguments(case: Case, model: Path, data: Path, output: Path) -> list[str]:
    """What both scripts are given."""
    flags = {
        **{"model_name_or_path": model, "dataset_name": data, "output_dir": output, "dtype": "float32"},
        **{"max_length": MAX_LENGTH, "per_device_train_batch_size": BATCH, "num_train_epochs": 1},
        **{"learning_rate": 1e-5, "lr_scheduler_type": "constant", "gradient_checkpointing": "false"},
        **{"bf16": "false", "use_cpu": str(not torch.cuda.is_available()).lower(), "seed": 1},
        **{"logging_steps": 10, "save_strategy": "no", "report_to": "tensorboard", "disable_tqdm": "true"},
        **({"use_peft": "true", "lora_r": 16, "lora_alpha": 32} if case.lora else {}),
        **({"lora_target_modules": "all-linear"} if case.lora else {}),
        **({"packing": "true"} if case.packing else {}),
    }
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def train(case: Case, side: str, model: Path, data: Path, folder: Path) -> float:
    """Launches one script; returns the seconds of its `trainer.train()`.

    Raises:
        RuntimeError: it failed.
    """
    output = folder / "run"
    shutil.rmtree(output, ignore_errors=True)
    threads = max(1, len(os.sched_getaffinity(0)) // case.processes)
    on_cpu = {} if torch.cuda.is_available() else {"ACCELERATE_USE_CPU": "true"}
    env = environment(OMP_NUM_THREADS=str(threads), **on_cpu)
    launch = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(yaml_of(case, folder / "y.yaml")),
    ]
    words = [*launch, "--main_process_port", "0", *SIDES[side], *arguments(case, model, data, output)]
    ended = subprocess.run(words, env=env, capture_output=True, text=True, timeout=LAUNCH_SECONDS)
    if ended.returncode:
        raise RuntimeError(f"{side}: {case.name}\n{ended.stderr[-3000:]}")
    return runtime(output)


def runtime(output: Path) -> float:
    """Trainer's `train_runtime`, from the one log that both write."""
    for events in output.rglob("events.out.tfevents.*"):
        log = EventAccumulator(str(events))
        log.Reload()
        if "train/train_runtime" in log.Tags()["scalars"]:
            return float(log.Scalars("train/train_runtime")[-1].value)
    raise RuntimeError(f"no train_runtime below {output}")


def cases(models: list[str]) -> Iterator[Case]:
    """All rows of the table."""
    for model, processes, (lora, packing) in product(models, (1, 2), ((False, False), (False, True), (True, False))):
        yield Case(model, processes, lora, packing)


def measured(case: Case, model: Path, times: int) -> str:
    """One row of the table: tokens/s of both, the ratio of their medians, and the range of the ratios of each turn."""
    with tempfile.TemporaryDirectory() as place:
        tokens = write_rows(case, model, Path(place) / "data")
        seconds: dict[str, list[float]] = {side: [] for side in SIDES}
        for turn in range(times):
            for side in SIDES if turn % 2 == 0 else reversed(SIDES):
                seconds[side].append(train(case, side, model, Path(place) / "data", Path(place)))
    ours, trl = (tokens / median(seconds[side]) for side in SIDES)
    ratios = sorted(other / first for first, other in zip(*seconds.values(), strict=True))
    return f"| {case.name} | {ours:,.0f} | {trl:,.0f} | {ours / trl:.2f} | {ratios[0]:.2f} to {ratios[-1]:.2f} |"


def main() -> None:
    """Prints the table; with --write keeps it in RESULTS.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "demo" / "model", help="folder of SmolLM2-135M")
    parser.add_argument("--only", choices=[NARROW, SMOLLM2])
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    lines = ["| training | tokens/s | TRL | ratio | of each turn |", "|---|---|---|---|---|"]
    print(*lines, sep="\n")
    with tempfile.TemporaryDirectory() as place:
        models = {SMOLLM2: options.model, NARROW: narrow_model(options.model, Path(place) / "narrow")}
        for case in cases([options.only] if options.only else [NARROW, SMOLLM2]):
            lines.append(measured(case, models[case.model], options.times))
            print(lines[-1], flush=True)
    if options.write:
        results.keep("training", [*preface(options.times), "", *lines])


def preface(times: int) -> list[str]:
    """What was measured, and what each side computes besides."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {len(os.sched_getaffinity(0))} cores"
    return [
        "## Training against TRL",
        "",
        "`python benchmarks/throughput.py --write`",
        "",
        f"`accelerate launch` of `train/sft.py` and of `trl.scripts.sft` with the same YAML (one process, or DDP of "
        f"two), one epoch of chats of less than {MAX_LENGTH} tokens ({ROWS[NARROW]} of them, {ROWS[SMOLLM2]} for "
        f"{SMOLLM2}), {BATCH} rows a rank, fp32, {device}, in turns, median of {times}. TRL {version('trl')}, "
        f"transformers {version('transformers')}.",
        "",
        "Seconds are Trainer's `train_runtime`; tokens are those of documents. Both compute loss, gradient norm and "
        "the accuracy of the predicted tokens; TRL also the entropy of the predictions, ours also rate and memory "
        "beside each logged loss.",
    ]


if __name__ == "__main__":
    main()
