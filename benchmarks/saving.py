"""How long training waits for a checkpoint: `python benchmarks/saving.py [--gb 0.5 2] [--write]`, on two idle cores.

`train/sft.py` under FSDP2 on two ranks saves four times, in line and with `--async_checkpoints`, beside torch's own
`async_save` of the same states alone. Both ranks keep both cores busy, so that a write takes from training. Of each,
the median wait, and the median of the steps while a save is written as a ratio to that of the others. Sizes are those
of float32 weights with AdamW's moments.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import results
import torch
from children import environment
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CASE = Path(__file__).parent / "saving_case.py"
STEPS, SAVE_STEPS = 26, 6
BYTES_PER_WEIGHT = 12
SIDES = {
    "in line": ("ours", ()),
    "async": ("ours", ("--async_checkpoints",)),
    "torch": ("torch", ()),
}
"""What `saving_case.py` does, and the script's further arguments."""
LAUNCH_SECONDS = 1800


def write_model(folder: Path, size_bytes: float, width: int = 1024) -> None:
    """A Llama whose weights and moments have about this size, with a tokenizer of bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(models.BPE({letter: number for number, letter in enumerate([*alphabet, "<eos>"])}, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<eos>", pad_token="<eos>")
    inner = width * 11 // 4
    sizes = {"hidden_size": width, "intermediate_size": inner, "num_attention_heads": 16, "vocab_size": len(tokenizer)}
    of_layer = 4 * width**2 + 3 * width * inner
    layers = max(round(size_bytes / BYTES_PER_WEIGHT / of_layer), 1)
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def measured(side: str, model: Path, folder: Path) -> dict[str, Any]:
    """The waits of the saves and the steps of one run, on rank 0.

    Raises:
        RuntimeError: it failed.
    """
    kind, more = SIDES[side]
    out, rows, config = folder / f"{side}.json", folder / "rows.jsonl", folder / "fsdp.yaml"
    rows.write_text("".join(json.dumps({"text": f"{number} " * 64}) + "\n" for number in range(200)))
    made = [sys.executable, "-m", "accel_fsdp", "config", "--yes", "--model", str(model), "--num-processes", "2"]
    env = environment(OMP_NUM_THREADS="1")
    made += ["--mixed-precision", "no", "--output", str(config), "--force"]
    subprocess.run(made, check=True, env=env, capture_output=True)
    flags = {
        **{"model_name_or_path": model, "dataset_name": rows, "output_dir": folder / side, "max_length": 128},
        **{"per_device_train_batch_size": 1, "max_steps": STEPS, "save_strategy": "steps", "save_steps": SAVE_STEPS},
        **{"save_total_limit": 1, "report_to": "none", "disable_tqdm": "true", "final_export": "stream"},
    }
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    words = [*launch, "--main_process_port", "0", str(CASE)]
    words += [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    env |= {"SAVING_SIDE": kind, "SAVING_OUT": str(out)}
    ended = subprocess.run([*words, *more], env=env, capture_output=True, text=True, timeout=LAUNCH_SECONDS)
    shutil.rmtree(folder / side, ignore_errors=True)
    if not out.is_file():
        raise RuntimeError(f"{side}\n{ended.stderr[-3000:]}")
    content: dict[str, Any] = json.loads(out.read_text())
    return content


def row(gb: float, side: str, run: dict[str, Any], in_line: float) -> str:
    """A row of the table; steps before the first save are left out: a process is slower while it still takes memory."""
    waited = median(run["waited"])
    beside = [seconds for seconds, is_written in run["steps"][SAVE_STEPS:] if is_written]
    alone = [seconds for seconds, is_written in run["steps"][SAVE_STEPS:] if not is_written]
    ratio = f"{median(beside) / median(alone):.2f} ({len(beside)} steps)" if beside else ""
    return f"| {gb:g} GB | {side} | {waited:.2f} s | {waited / in_line:.0%} | {median(alone):.2f} s | {ratio} |"


def lines(sizes: list[float]) -> list[str]:
    """The section of RESULTS.md."""
    rows = []
    for gb in sizes:
        with tempfile.TemporaryDirectory() as place:
            write_model(Path(place) / "model", gb * 1e9)
            runs = {side: measured(side, Path(place) / "model", Path(place)) for side in SIDES}
        in_line = median(runs["in line"]["waited"])
        rows += [row(gb, side, run, in_line) for side, run in runs.items()]
    return [
        "## Saves in the background",
        "",
        "`python benchmarks/saving.py --write`: `train/sft.py` under FSDP2 on two CPU ranks, in line and with",
        "`--async_checkpoints`, beside torch's `async_save` of the same states, without Trainer's files, hashes and",
        f"marker; torch {torch.__version__}. Medians of four saves and of the steps between them. Both ranks keep both",
        "cores busy, so that a write takes from training.",
        "",
        "| state | save | training waits | of in line | step | a step while a save is written, to the others |",
        "|---|---|---|---|---|---|",
        *rows,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, nargs="+", default=[0.5, 2])
    parser.add_argument("--write", action="store_true", help="write the section of RESULTS.md")
    options = parser.parse_args()
    section = lines(options.gb)
    print("\n".join(section))
    if options.write:
        results.keep("saving", section)


if __name__ == "__main__":
    main()
