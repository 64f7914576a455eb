"""The data flags of `train/sft.py` on two processes: packing, masks, streams, and a row that stops the job."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import CHAT_DATA, Finished
from datasets import Dataset
from jobs import STEPS, logged_losses
from test_packing import plain
from transformers import AutoModelForCausalLM, AutoTokenizer

from accel_fsdp.training.data import DataArguments, packing, tokenizing

Launches = Callable[..., Finished]
LEARNING_RATE = 0.5
TOLERANCE = 1e-5
LIMIT = 128


@pytest.fixture
def chats(tiny_model: Path, tmp_path: Path) -> Path:
    """Short chats, as many as fill exactly four rows of the limit: one step of two ranks with two rows each."""
    lines = (CHAT_DATA / "train.jsonl").read_text().splitlines()
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    rows: list[dict[str, object]] = []
    for number, line in enumerate(lines):
        turns = [{**turn, "content": turn["content"][: 8 + 5 * (number % 7)]} for turn in json.loads(line)["messages"]]
        more = [*rows, {"messages": turns}]
        options = DataArguments("chats", max_length=LIMIT, packing=True)
        packed = tokenizing.tokenize(Dataset.from_list(more), tokenizer, options)[0]
        assert isinstance(packed, packing.Packed)
        if len(packed) > 4:
            break
        rows = more
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def losses_one_by_one(model_folder: Path, path: Path) -> list[float]:
    """Plain SGD on all documents at every step, each alone in its forward pass; only what the assistant says counts."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    options = DataArguments(str(path), max_length=LIMIT, assistant_only_loss=True)
    rows = tokenizing.tokenize(Dataset.from_json(str(path)), AutoTokenizer.from_pretrained(model_folder), options)[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for _ in range(STEPS):
        losses.append(plain(model, rows)[0].item())
        optimizer.step()
    return losses


def test_packed_training_on_two_ranks_is_that_of_single_documents(
    chats: Path, launches: Launches, tiny_model: Path, tmp_path: Path
) -> None:
    flags = ("--packing", "--assistant_only_loss", "--max_length", str(LIMIT), "--optim", "sgd", "--max_grad_norm", "0")
    finished = launches(*flags, "--learning_rate", str(LEARNING_RATE), data=chats, answers={"fsdp_version": "2"})
    assert "packed into 4, padding " in finished.output
    expected = losses_one_by_one(tiny_model, chats)
    assert expected[0] - expected[-1] > 0.1
    assert logged_losses(tmp_path / "run") == pytest.approx(expected, abs=TOLERANCE)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["plan"]["recipe"]["packed"]


def test_a_stream_trains_and_is_evaluated(chats: Path, launches: Launches, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("train", "test"):
        (folder / f"{name}.jsonl").write_text(chats.read_text())
    flags = ("--streaming", "--packing", "--max_length", str(LIMIT))
    finished = launches(*flags, "--eval_strategy", "steps", "--eval_steps", str(STEPS), data=folder)
    assert len(logged_losses(tmp_path / "run")) == STEPS
    assert "held-out loss" in finished.output


def test_a_corrupt_row_stops_all_ranks_with_one_message(chats: Path, launches: Launches, tmp_path: Path) -> None:
    lines = chats.read_text().splitlines()
    chats.write_text("\n".join([*lines, '{"messages": [{"role": "user"}]}']) + "\n")
    output = launches(data=chats, fails=True).output
    message = f"error: {chats}, row {len(lines) + 1}: "
    assert output.count(f"\n{message}") == 1
    assert output.count(message) == 2  # the launcher's account has it too
    assert output.count("Traceback") == 1  # the launcher's own
    assert not (tmp_path / "run" / "final").exists()
