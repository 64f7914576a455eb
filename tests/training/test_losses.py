"""The losses of a run on one process, compared with plain loops; and what ends a run whose loss is not a number.

`test_engines.py` has the same of several processes. Here the script runs in the test's own process.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, Finished
from jobs import STEPS, logged_losses, save
from reference import SGD_LEARNING_RATE, train
from safetensors.torch import load_file
from torch.nn import functional
from transformers import (
    AutoTokenizer,
    BartConfig,
    BartForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
)

from accel_fsdp.training import Diverged, divergence, losses
from accel_fsdp.training.data import IGNORED
from accel_fsdp.training.reporting import run_record

Trains = Callable[..., Finished]
PER_RANK, ACCUMULATED = 2, 2
SGD = ("--optim", "sgd", "--max_grad_norm", "0")
ACCUMULATING = (*SGD, "--learning_rate", str(SGD_LEARNING_RATE), "--gradient_accumulation_steps", str(ACCUMULATED))
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
GPT2 = {"vocab_size": 509, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 256, **NO_DROPOUT}
BART = {
    **{"vocab_size": 509, "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 64},
    **{"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0},
    **{"is_decoder": True, "is_encoder_decoder": False, "pad_token_id": 0},
}


@pytest.mark.parametrize("make", ["gpt2", "bart"])
def test_every_predicted_token_counts_once_whatever_the_class_does(
    make: str, trains: Trains, tiny_model: Path, text_data: Path, tmp_path: Path
) -> None:
    """Trainer counts the first token of each row too, which nothing predicts, where no class says ForCausalLM.

    Bart's decoder compares each prediction with the token that it was made at, and learns to repeat it.
    """
    torch.manual_seed(0)
    made = GPT2LMHeadModel(GPT2Config(**GPT2)) if make == "gpt2" else BartForCausalLM(BartConfig(**BART))
    model = save(made, tmp_path / make, tiny_model)
    finished = trains(*ACCUMULATING, model=model)
    assert "PAD/BOS/EOS" not in finished.output  # the config's are others than the tokenizer's
    assert ("the model's own loss is not the mean over next tokens" in finished.output) == (make == "bart")
    expected = train(model, text_data, steps=STEPS, global_batch=PER_RANK * ACCUMULATED, sgd=True)
    assert logged_losses(tmp_path / "run") == pytest.approx(expected.losses, abs=1e-5)


def test_a_routers_loss_weighs_the_same_however_many_micro_batches_there_are(
    trains: Trains, tiny_model: Path, text_data: Path, tmp_path: Path
) -> None:
    """Trainer adds one for each micro-batch of each rank."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 509, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4, "max_position_embeddings": 256}
    config = MixtralConfig(**sizes, **heads, output_router_logits=True, router_aux_loss_coef=0.5)
    model = save(MixtralForCausalLM(config), tmp_path / "mixtral", tiny_model)
    trains(*ACCUMULATING, model=model)
    assert logged_losses(tmp_path / "run") == pytest.approx(losses_with_a_router(model, text_data), abs=1e-5)


def losses_with_a_router(folder: Path, data: Path) -> list[float]:
    """Plain SGD: the mean over a step's tokens, and the mean over its micro-batches of what the router loses."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = MixtralForCausalLM.from_pretrained(folder, dtype=torch.float32)
    texts = [json.loads(line)["text"] for line in data.read_text().splitlines()]
    rows = [torch.tensor([*tokenizer(text)["input_ids"], tokenizer.eos_token_id]) for text in texts]
    optimizer = torch.optim.SGD(model.parameters(), lr=SGD_LEARNING_RATE)
    losses_seen = []
    for step in range(STEPS):
        batches = [rows[start : start + PER_RANK] for start in range(step * 4, step * 4 + 4, PER_RANK)]
        tokens = sum(len(row) - 1 for batch in batches for row in batch)
        lost, routed = torch.tensor(0.0), torch.tensor(0.0)
        for batch in batches:
            ids = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)
            mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in batch], batch_first=True)
            out = model(input_ids=ids, attention_mask=mask)
            routed = routed + 0.5 * out.aux_loss / ACCUMULATED
            for logits, row in zip(out.logits, batch, strict=True):
                lost = lost + functional.cross_entropy(logits[: len(row) - 1], row[1:], reduction="sum")
        optimizer.zero_grad()
        (lost / tokens + routed).backward()
        optimizer.step()
        losses_seen.append((lost / tokens + routed).item())
    return losses_seen


EXPLODES = (*SGD, "--save_steps", "1", "--save_total_limit", "1")


def test_a_run_that_diverges_ends_there(trains: Trains, tmp_path: Path) -> None:
    """Weights of 1e28 after the first step; the second step's loss is NaN and nothing of it is kept."""
    out = tmp_path / "run"
    output = trains(*EXPLODES, "--learning_rate", "1e30", code=1).output
    assert "error: training diverged: in step 2 the loss is nan, the gradient norm nan" in output
    assert [output.count(f"step {step}/{STEPS}  loss") for step in (1, 2)] == [1, 1]
    assert f"the last finite weights are in {out / 'checkpoint-1'}" in output
    assert "a lower --learning_rate than 1e+30" in output
    assert [path.name for path in out.glob("checkpoint-*")] == ["checkpoint-1"]
    assert not (out / "final").exists()
    account = run_record.read(out)
    assert account["status"] == "diverged"
    assert math.isnan([row["loss"] for row in account["log"] if "loss" in row][-1])
    assert math.isnan(account["results"]["training loss"]["last"])


UNSAVED = {"saved": "", "exported": "--save_strategy=no", "ignored": "--ignore_nan_inf=true"}


@pytest.mark.parametrize("name", UNSAVED)
def test_infinite_weights_are_never_saved(name: str, trains: Trains, tmp_path: Path) -> None:
    """Weights that one step makes infinite: no later loss has shown it when they would be saved, or exported."""
    more = ("--max_steps", "1", UNSAVED[name]) if UNSAVED[name] else ("--max_steps", "6")
    finished = trains(*EXPLODES, "--learning_rate", "1e38", "--weight_decay", "1e6", *more, code=1)
    assert "error: training diverged: after step 1 the weights hold NaN or infinite values" in finished.output
    assert run_record.read(tmp_path / "run")["status"] == "diverged"
    assert not list(tmp_path.glob("run/checkpoint-*/*.safetensors"))
    assert not (tmp_path / "run" / "final").exists()


def test_a_step_that_is_no_number_can_be_left_out(trains: Trains, tmp_path: Path) -> None:
    """Every step after the first is; none of them changes a weight, and nobody reads a zero."""
    output = trains(*EXPLODES, "--learning_rate", "1e30", "--ignore_nan_inf", "true", "--max_steps", "3").output
    assert "in step 3 the loss is nan, the gradient norm nan; its update is left out" in output
    assert "training loss: 6.2" in output
    assert "-> nan" in output
    weights = load_file(tmp_path / "run" / "final" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values())
    assert "| nan |" in (tmp_path / "run" / "final" / "README.md").read_text()


def test_a_held_out_loss_that_is_no_number_is_never_the_best(trains: Trains, tmp_path: Path) -> None:
    best = ("--early_stopping_patience", "1", "--eval_strategy", "steps", "--eval_steps", "1", "--save_steps", "1")
    more = (*EXPLODES, *best, "--learning_rate", "1e30", "--dataset_test_split", "train")
    assert "after step 1 the held-out loss is nan" in trains(*more, code=1).output
    assert not (tmp_path / "run" / "final").exists()


@pytest.mark.parametrize(("precision", "left_out"), [("fp16", divergence.SKIPPED_IN_A_ROW - 1), ("bf16", 0)])
def test_what_a_scaler_leaves_out_is_no_divergence(precision: str, left_out: int) -> None:
    """fp16 begins with gradients that are too large, and looks for the scale; unless it never finds one."""
    args = {"device": "cpu", "ignore_nan_inf": False, "output_dir": "none", "learning_rate": 1e-3, "max_grad_norm": 1.0}
    run = SimpleNamespace(
        args=SimpleNamespace(**args),
        accelerator=SimpleNamespace(mixed_precision=precision, gather=lambda tensor: tensor),
        state=SimpleNamespace(global_step=0),
        log=lambda logs: None,
        _get_learning_rate=lambda: 1e-3,
    )
    check = divergence.FiniteCheck(run)
    for _ in range(left_out):
        check.check_step(torch.tensor(math.inf))
    with pytest.raises(Diverged, match="gradient norm inf"):
        check.check_step(torch.tensor(math.inf))
    check = divergence.FiniteCheck(run)
    check.step_loss = torch.tensor(math.nan)
    with pytest.raises(Diverged, match="loss is nan"):
        check.check_step(torch.tensor(1.0))


def test_one_ranks_infinite_loss_stops_all(launches: Callable[..., Finished], tmp_path: Path) -> None:
    """Its gradients may be finite; the others know nothing of it and must not wait for a rank that has left."""
    scarce, answers = ROOT / "tests" / "scarce.py", {"fsdp_version": "2", "mixed_precision": "bf16"}
    finished = launches(script=scarce, answers=answers, fails=True, SCARCE="number")
    assert "error: training diverged: in step 2 the loss is inf, the gradient norm 0." in finished.output
    assert "a collective failed" not in finished.output
    _, _, account = finished.output.partition("Root Cause (first observed failure)")
    assert "traceback : error: training diverged: in step 2 the loss is inf" in account  # the launcher's last words
    [first, *_] = [row["loss"] for row in run_record.read(tmp_path / "run")["log"] if "loss" in row]
    assert first != torch.tensor(first).bfloat16().item()  # FSDP2 would round it


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neither_ties_nor_ignored_places_count(dtype: torch.dtype) -> None:
    """Dead logits are all the same, and predict nothing; the ones that are looked at stay as they are."""
    given = torch.tensor([[[1.0, 2.0, 0.0], [3.0, 3.0, 0.0], [0.0, 0.0, 9.0]]], dtype=dtype, requires_grad=True)
    logits = given * 1.0
    assert losses.right_tokens(logits, torch.tensor([[1, 0, IGNORED]])).item() == 1
    assert losses.right_tokens(logits, torch.tensor([[0, 2, 2]])).item() == 1
    assert losses.right_tokens(torch.zeros(1, 10, 509, dtype=dtype), torch.arange(10)[None]).item() == 0
    assert torch.equal(logits, given)
    logits.square().sum().backward()
    assert torch.equal(given.grad, 2 * given)


def test_a_kernel_that_keeps_the_logits_counts_itself() -> None:
    """Liger hands out the share of right tokens, of which two out of four have a target."""
    counted = losses.Losses.__new__(losses.Losses)
    counted._scored = 0.0
    wanted = torch.tensor([[1, IGNORED, 2, IGNORED]])
    counted._score({"logits": None}, wanted)
    assert counted._scored == 0.0
    counted._score({"logits": None, "token_accuracy": torch.tensor(0.5)}, wanted)
    assert counted._scored.tolist() == [1, 2]
