"""The same job as `train/sft.py` in plain PyTorch, one process: the independent route the tests compare with.

No Trainer, no Accelerate, no FSDP, no code of accel_fsdp.
"""

import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

LEARNING_RATE = 1e-3
LORA_LEARNING_RATE = 1e-2
SGD_LEARNING_RATE = 2.0
GRADIENT_NORM = 1.0
SEED = 42
"""Trainer's default."""


@dataclass(frozen=True)
class Reference:
    """Of each step the mean loss per token, the gradient's norm and the share of tokens that the model got right.

    The weights and AdamW's moments are those after the last step; `held_out` and `held_out_accuracy` are theirs, over
    all rows of the data, without smoothing.
    """

    losses: list[float]
    norms: list[float]
    accuracies: list[float]
    weights: dict[str, torch.Tensor]
    moments: dict[str, torch.Tensor]
    held_out: float
    held_out_accuracy: float


@cache
def train(
    model_folder: Path,
    data: Path,
    *,
    steps: int,
    global_batch: int,
    sgd: bool = False,
    lora: bool = False,
    quantized: bool = False,
    smoothing: float = 0.0,
    sgd_rate: float = SGD_LEARNING_RATE,
    targets: str | tuple[str, ...] = "all-linear",
) -> Reference:
    """Trains over `steps` global batches of consecutive rows, loss averaged over all tokens of a batch.

    The last batch of an epoch has the rows that are left.

    AdamW without decay, gradients clipped; with `sgd` neither, so that a wrong scale of the gradients would show. With
    `lora` an adapter of the script's default size is trained and the weights are the merged model's; `quantized`, on a
    base of 4 bits, and nothing is merged; `targets` are the layers that it adapts.
    """
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(
        model_folder, dtype=torch.float32, quantization_config=four_bits if quantized else None
    )
    if lora:
        torch.manual_seed(SEED)
        settings = LoraConfig(r=16, lora_alpha=32, target_modules=targets, task_type="CAUSAL_LM")
        model = get_peft_model(model, settings)
    model.train()
    texts = [json.loads(line)["text"] for line in data.read_text().splitlines()]
    rows = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
    rate = LORA_LEARNING_RATE if lora else LEARNING_RATE
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(
        model.parameters(), lr=rate, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0
    )
    if sgd:
        optimizer = torch.optim.SGD(model.parameters(), lr=sgd_rate)
    losses, norms, accuracies = [], [], []
    for step in range(steps):
        place = step % -(-len(rows) // global_batch) * global_batch
        batch = rows[place : place + global_batch]
        results = [_loss_and_right(model, row, smoothing) for row in batch]
        tokens = sum(len(row) - 1 for row in batch)
        total = sum(loss for loss, _ in results) / tokens
        optimizer.zero_grad()
        total.backward()
        limit = math.inf if sgd else GRADIENT_NORM
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), limit).item())
        optimizer.step()
        losses.append(total.item())
        accuracies.append(sum(right for _, right in results) / tokens)
    moments = {
        f"state.{name}.{key}": optimizer.state[parameter][key]
        for name, parameter in model.named_parameters()
        for key in ("exp_avg", "exp_avg_sq")
        if key in optimizer.state[parameter]
    }
    model = model.merge_and_unload() if lora and not quantized else model
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():  # not in eval mode: nothing drops out here, and 4-bit layers would be packed for the CPU
        results = [_loss_and_right(model, row) for row in rows]
    tokens = sum(len(row) - 1 for row in rows)
    held_out, right = (sum(finding[place] for finding in results) / tokens for place in (0, 1))
    return Reference(losses, norms, accuracies, weights, moments, float(held_out), float(right))


def _loss_and_right(model: torch.nn.Module, row: list[int], smoothing: float = 0.0) -> tuple[torch.Tensor, int]:
    """Summed over a row's tokens; smoothing gives every token of the vocabulary an equal part of the target."""
    ids = torch.tensor([row])
    logs = functional.log_softmax(model(input_ids=ids).logits[0, :-1].float(), dim=-1)
    own = logs.gather(1, ids[0, 1:, None])[:, 0]
    loss = -(1 - smoothing) * own.sum() - smoothing * logs.mean(dim=1).sum()
    return loss, int((logs.argmax(dim=1) == ids[0, 1:]).sum())


def job_words(model: Path, data: Path, output: Path, steps: int, per_rank: int, save_steps: int = 0) -> list[str]:
    """What makes `train/sft.py` do as `train` does; it saves every so many steps, or not at all."""
    fixed = {
        "--model_name_or_path": model,
        "--dataset_name": data,
        "--output_dir": output,
        "--max_steps": steps,
        "--per_device_train_batch_size": per_rank,
        "--learning_rate": LEARNING_RATE,
        "--lr_scheduler_type": "constant",
        "--train_sampling_strategy": "sequential",
        "--logging_steps": 1,
        **({"--save_steps": save_steps} if save_steps else {"--save_strategy": "no"}),
        "--disable_tqdm": "true",
    }
    return [str(word) for pair in fixed.items() for word in pair]


def losses_of(run: Path, steps: int) -> list[float]:
    """Losses at full precision, from the last checkpoint of a run."""
    state = json.loads((run / f"checkpoint-{steps}" / "trainer_state.json").read_text())
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]


def equal(one: Any, other: Any) -> bool:
    """Whether two nested states hold the same numbers."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)
