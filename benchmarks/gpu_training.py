"""The training step of `train/sft.py` on one device: part of `gpu.py`.

Each case is a run of the script itself under torchrun, FSDP2 on one rank: a model of the catalogue with random weights,
packed rows of the shipped chats, the script's own account (`run.json`) as the measure. Nothing is downloaded.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import results
from children import ROOT, environment, measured

from accel_fsdp.atomic_files import write_text
from accel_fsdp.hardware import Gpu, gpus
from accel_fsdp.job import Job, Layout, Recipe, from_arguments
from accel_fsdp.models import catalogue
from accel_fsdp.prediction import predicted, step_time
from accel_fsdp.prediction.tracing import by_name
from accel_fsdp.training.reporting import run_record
from accel_fsdp.units import GIB
from accel_fsdp.wizard import interview, to_text

CHATS = ROOT / "train" / "data" / "fsdp_chat" / "train.jsonl"
STEPS, WINDOW, WARM_UP = 16, 4, 4
"""Steps of a run, steps per measurement, and steps before the first one that counts."""
CASE_SECONDS = 420
LINES = 40
"""Of what a failed run printed: the launcher's own words come last, and are many."""
LORA = ("--use_peft", "true")
HEAD = (
    "| case | device | tokens/s | plain loop | planned | MFU | peak memory | planned |",
    "|---|---|---|---|---|---|---|---|",
)
NOTE = "The plain loop (`gpu_plain.py`) trains the same shape without FSDP and Trainer; the plan is today's."


@dataclass(frozen=True)
class Case:
    """A shape of the catalogue, and how it is trained."""

    model: str
    rows: int
    length: int
    flags: tuple[str, ...] = ()
    precision: str = "bf16"
    layers: int | None = None

    @property
    def name(self) -> str:
        """Such as "Llama-3.2-1B 4x2048 LoRA bf16"."""
        kind = "LoRA" if "--use_peft" in self.flags else "full"
        pure = " without float32 weights" if "--dtype" in self.flags else ""
        return f"{self.model.rpartition('/')[2]} {self.rows}x{self.length} {kind}{pure}"


CHECKPOINTED = ("--gradient_checkpointing", "true")
GPU = (
    Case("meta-llama/Llama-3.2-1B", 4, 2048),
    Case("meta-llama/Llama-3.2-1B", 4, 2048, LORA),
    Case("meta-llama/Llama-3.1-8B", 2, 2048, (*LORA, *CHECKPOINTED)),
    Case("meta-llama/Llama-3.1-8B", 1, 2048, ("--dtype", "bfloat16", *CHECKPOINTED), precision="no"),
)
CPU = (Case("HuggingFaceTB/SmolLM2-135M", 1, 64, precision="no", layers=2),)


def config_of(case: Case) -> dict[str, Any]:
    """The model's configuration, cut if the case says so."""
    config = dict(catalogue.entries()[case.model]["config"])
    return config | {"num_hidden_layers": case.layers or config["num_hidden_layers"]}


def write_model(case: Case, folder: Path) -> None:
    """Random bfloat16 weights of the case's shape, and a tokenizer of the shipped chats' words.

    On the GPU where there is one: filling 8 billion weights takes a CPU minutes.
    """
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    config = config_of(case)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        wanted = AutoConfig.for_model(config.pop("model_type"), **config)
        model = AutoModelForCausalLM.from_config(wanted, dtype=torch.bfloat16, trust_remote_code=False)
    model.save_pretrained(folder)
    del model
    torch.cuda.empty_cache()  # this process lives on beside the one that trains
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.train([str(CHATS)], trainers.BpeTrainer(vocab_size=4096, special_tokens=["<eos>"], show_progress=False))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<eos>").save_pretrained(folder)


def write_data(case: Case, path: Path) -> None:
    """Documents of the shipped chats, again and again, enough for all steps."""
    chats = [json.loads(line)["messages"] for line in CHATS.read_text().splitlines()]
    texts = ["\n".join(turn["content"] for turn in turns) for turns in chats]
    wanted = 6 * case.rows * case.length * STEPS  # characters, of which no token has as many
    repeats = wanted // sum(map(len, texts)) + 1
    lines = [json.dumps({"text": f"{turn}: {text}"}) for turn in range(repeats) for text in texts]
    path.write_text("\n".join(lines) + "\n")


def measure(case: Case, folder: Path) -> dict[str, Any]:
    """Trains a case in a process of its own; the script's account, or an error in the last lines of what it printed."""
    model, data, config, run = folder / "model", folder / "train.jsonl", folder / "fsdp.yaml", folder / "run"
    write_model(case, model)
    write_data(case, data)
    asked = {"model": str(model), "num_processes": "1", "mixed_precision": case.precision}
    write_text(config, to_text(interview.answers(interview.interview(asked, {}, "defaults"))))
    where = ("--model_name_or_path", model, "--dataset_name", data, "--output_dir", run, "--save_strategy", "no")
    batch = ("--packing", "true", "--max_length", case.length, "--per_device_train_batch_size", case.rows)
    steps = ("--max_steps", STEPS, "--logging_steps", WINDOW, "--disable_tqdm", "true", "--report_to", "none")
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
    script = (ROOT / "train" / "sft.py", "--accelerate_config", config)
    command = [*launcher, *script, *where, *batch, *steps, *case.flags]
    ran = subprocess.run(
        list(map(str, command)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=CASE_SECONDS,
        env=environment(),
    )
    account = run_record.read(run)
    if ran.returncode or account.get("status") != "finished":
        return {"error": "\n".join(ran.stdout.strip().splitlines()[-LINES:])}
    return account


def plain_of(case: Case, device: str) -> float:
    """The seconds of the same step in `gpu_plain.py`; 0 if it failed, with the reason printed."""
    recipe = recipe_of(case)
    settings = {"config": config_of(case), "rows": case.rows, "length": case.length, "dtype": recipe.dtype}
    settings |= {"adapter": recipe.method != "full", "checkpointing": recipe.recomputes, "precision": case.precision}
    settings |= {"attention": recipe.attention, "optimizer": recipe.optimizer}
    outcome = measured("gpu_plain.py", settings, device, CASE_SECONDS)
    if "error" in outcome:
        print(f"{case.name}, plain: FAILED: {outcome['error']}", flush=True)
    return float(outcome.get("seconds", 0))


def recipe_of(case: Case) -> Recipe:
    """How the case trains, in the planner's terms."""
    words = dict(zip(case.flags[::2], case.flags[1::2], strict=True))
    arguments = {flag.removeprefix("--"): value for flag, value in words.items()}
    sizes = {"per_device_train_batch_size": case.rows, "max_length": case.length, "packing": True}
    return replace(from_arguments.recipe_of(arguments | sizes), precision=case.precision)


def planned(case: Case, gpu: Gpu) -> tuple[float, int]:
    """What the plan says: tokens/s and the peak's bytes."""
    recipe, layout = recipe_of(case), Layout("fsdp2", 1, 1, 1)
    shape, tapes = by_name.read_shape(case.model, recipe)
    job = Job(layout, recipe)
    return step_time(shape, recipe, layout, gpu).tokens_per_s_per_gpu, predicted(shape, tapes, job, gpu).peak.total


def row(case: Case, device: str, rate: float, mfu: float | None, peak: int, plain_seconds: float) -> str:
    """One line of the table; 0 for what is unknown."""
    gpu = None if device == "cpu" else gpus.find(device)
    plan_rate, plan_peak = planned(case, gpu) if gpu else (0, 0)
    plain_rate = case.rows * case.length / plain_seconds if plain_seconds else 0
    rates = [f"{number:,.0f}" if number else "unknown" for number in (rate, plain_rate, plan_rate)]
    share = f"{mfu:.1%}" if mfu is not None else "unknown"
    sizes = [f"{size / GIB:.1f} GiB" if size else "unknown" for size in (peak, plan_peak)]
    return "| " + " | ".join([case.name, device, *rates, share, *sizes]) + " |"


def row_of(case: Case, account: dict[str, Any], plain_seconds: float) -> str:
    """The line of a run's account, of the windows after the warm-up."""
    windows = [entry for entry in account["log"] if "tokens_per_second" in entry and entry["step"] > WARM_UP]
    rate = median(entry["tokens_per_second"] for entry in windows)
    mfu = median(entry["mfu"] for entry in windows) if "mfu" in windows[0] else None
    peak = account["results"]["peak_memory_bytes"].get("measured", 0)
    return row(case, account["machine"]["device"], rate, mfu, peak, plain_seconds)


def run_all(cases: Sequence[Case], device: str) -> list[str]:
    """Runs the cases; prints each line of the table as it comes, and keeps it if it is of a GPU. Returns the lines."""
    lines: list[str] = []
    print(*HEAD, sep="\n")
    for case in cases:
        folder = Path(tempfile.mkdtemp(prefix="gpu-training-"))
        try:
            account = measure(case, folder)
        except subprocess.TimeoutExpired:
            account = {"error": f"still running after {CASE_SECONDS} s"}
        finally:
            shutil.rmtree(folder, ignore_errors=True)  # an 8B model and its export: 32 GB
        if "error" in account:
            print(f"{case.name}: FAILED: {account['error']}", flush=True)
            continue
        lines.append(row_of(case, account, plain_of(case, device)))
        print(lines[-1], flush=True)
        if device == "cuda":
            keep(lines[-1])
    return lines


def keep(line: str) -> None:
    """Writes a line to the table in RESULTS.md, in place of an older one of the same case and device."""
    old = [kept for kept in results.kept("gpu-training") if kept.startswith("| ") and kept not in HEAD]
    lines = {tuple(each.split(" | ")[:2]): each for each in (*old, line)}
    text = f"`python benchmarks/gpu.py --training`: `train/sft.py`, packed rows, steps {WARM_UP} to {STEPS}."
    results.keep("gpu-training", ["## The training step on a GPU", "", text, NOTE, "", *HEAD, *lines.values()])
